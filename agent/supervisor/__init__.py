"""The parent of the rank processes: a zygote that forks them, links to them, their logs, and their ends."""
