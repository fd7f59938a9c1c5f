"""`liver demo`: a real job through real spot notices on this machine, and what was measured."""
