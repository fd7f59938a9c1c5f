"""All tests; the folders mirror the source tree (see CONTRIBUTING.md)."""
