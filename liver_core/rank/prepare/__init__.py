"""Before the boundary: the next world is built beside the one that trains."""
