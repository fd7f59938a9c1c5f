"""LiveR on this machine: a service, agents, and a metadata endpoint for each node, as processes that end together."""
