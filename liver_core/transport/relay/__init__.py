"""The stream relay: a process on each node that serves the memory of that node's ranks to other machines over TCP."""
