"""How the agents of one job exchange messages without the service: signed HTTP on private addresses."""
