"""What a job should run on and what it should have: by its policy, its budget and its deadline. Pure."""
