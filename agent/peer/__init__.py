"""How the agents of one job talk to each other without the service: signed HTTP on private addresses."""
