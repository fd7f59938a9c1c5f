"""Jobs, their generations, steps, logs and checkpoints."""
