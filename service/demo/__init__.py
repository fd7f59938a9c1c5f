"""`liver demo`: service, agents, metadata endpoints and a real job on one machine, and what was measured."""
