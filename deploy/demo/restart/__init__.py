"""What a handoff is measured against: the same job in one process, and its restart by checkpoint and torchrun."""
