"""In the pause: the last gradients are read, the certificates compared, and the ranks switch worlds or stay."""
