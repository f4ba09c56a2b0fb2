"""`distopt run`: an agent on each node, and how the agents of several nodes act as one."""
