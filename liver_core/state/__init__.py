"""State: where the state of a job lives on a rank, as flat regions in the coordinates of liver_core.layout."""
