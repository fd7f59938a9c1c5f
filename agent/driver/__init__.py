"""Hosts the handoff machines of this node's ranks, carries out what they decide, and leads when it is its turn."""
