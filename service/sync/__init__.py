"""The API for agents: one sync operation and a wake stream."""
