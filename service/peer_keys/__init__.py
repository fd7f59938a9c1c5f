"""The key with which the agents of a job sign what they say to each other, and how it changes."""
