"""`distopt run`: an agent on each node, and how the agents of several nodes act as one.

Imports `supervise`, `heal` and `launchers`; starts without NumPy. Never knows what the ranks compute.
"""
