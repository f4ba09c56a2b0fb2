"""A communicator over several hosts: shared memory inside a host, PyTorch's Gloo between hosts.

May import `distopt.comm`, `tensors` and `private`. It moves arrays, and knows nothing of process groups.
"""
