"""The agents' surface: one sync operation and a stream that wakes."""
