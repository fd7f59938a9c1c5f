"""What a handoff is compared with: the same job without agents, and its restart by checkpoint and torchrun."""
