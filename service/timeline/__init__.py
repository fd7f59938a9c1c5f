"""A job's course: loss, pace, dollars and goodput by cause, and what happened, over one span of time."""
