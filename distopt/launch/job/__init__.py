"""Which rank a process is, of which job: the topology, and a small exchange of bytes."""
