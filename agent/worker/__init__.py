"""The rank process: what the zygote forks. Runs the user's job through liver_core.training and obeys its agent."""
