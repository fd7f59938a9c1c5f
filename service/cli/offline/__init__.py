"""Verbs that need no service: what a job needs, and whether it is ready, before it goes to a cluster."""
