"""Incidents: one notice with everything that followed from it, as a person reads it during the incident or after."""
