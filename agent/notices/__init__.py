"""Where a node hears that it will go: cloud metadata, polled or long-polled. Hearing is apart from deciding."""
