"""One file per schema revision, in order."""
