"""Detects that the cloud will take this node away, by polling its metadata. Decides nothing."""
