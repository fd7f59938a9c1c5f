"""A seeded simulator of the handoff: virtual clock, lossy network, crashing agents, ranks and stores. Pure."""
