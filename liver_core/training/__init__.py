"""Training: the contract a user's job fulfils, the loop around it, and the cutover from one world to the next."""
