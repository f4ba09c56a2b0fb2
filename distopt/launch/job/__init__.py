"""Who am I: the rank of a process, the size and the hosts of its job, and a small exchange of bytes.

Imports everything below it: `rendezvous`, `end_together`, `launchers`. Never knows who starts and supervises ranks.
"""
