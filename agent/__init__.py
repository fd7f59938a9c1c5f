"""One process per node: hears notices, drives handoffs with its peers, and keeps the rank processes alive."""
