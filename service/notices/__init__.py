"""Announcements that a node will go: appended, never edited."""
