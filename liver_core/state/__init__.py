"""State: a job's state on one rank, as flat regions in the coordinates of liver_core.layout."""
