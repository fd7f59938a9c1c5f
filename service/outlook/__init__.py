"""A job as a person wants to hear of it: where it stands and what comes next, its ranks by node, its first error."""
