"""The numbers of each step: to the agent, and to TensorBoard's files."""
