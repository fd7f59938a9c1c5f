"""The control plane: stores agents' reports, decides layouts, proposes handoffs, accounts time. Never imports torch."""
