"""What the service decided about each job, among what, why, and who asked."""
