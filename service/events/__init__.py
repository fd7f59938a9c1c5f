"""One stream of changes for all browsers of a service: what the pages show goes on without their asking again."""
