"""Nodes as their agents report them."""
