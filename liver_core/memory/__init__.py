"""How much memory a rank needs, in a layout and during a handoff: worked out before anything is built. Pure."""
