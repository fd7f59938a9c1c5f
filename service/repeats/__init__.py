"""Answers that were given under an idempotency key: the same request sent again gets the same answer."""
