"""Whether the tests can fail: a seeded sample of small mistakes in what decides, and which of them the tests find."""
