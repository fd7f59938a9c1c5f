"""How the nodes of a job reach each other's state, as their agents measured it."""
