"""The control plane: hears of nodes and notices, decides layouts, enacts handoffs, accounts. Never imports torch."""
