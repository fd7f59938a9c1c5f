"""What a job would have done on a trace of capacity: asked over the API, replayed in a process of its own."""
