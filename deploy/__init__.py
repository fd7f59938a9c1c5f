"""How LiveR is put on machines. `demo` puts all of it on this one."""
