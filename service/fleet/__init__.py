"""The fleet at a glance: nodes by pool, what they cost, who is about to go, and how often nodes went lately."""
