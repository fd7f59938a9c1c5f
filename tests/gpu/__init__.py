"""What runs on a machine with GPUs, by one command: `make gpu-check` there, or from the folder of `make gpu-bundle`."""
