"""Leases: capacity we hold, one open lease per living node, and what pools cost."""
