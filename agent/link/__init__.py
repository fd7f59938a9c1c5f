"""The agent's link to the service: sends reports, receives orders and wake-ups. The agent also works without it."""
