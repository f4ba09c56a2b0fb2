"""Collectives over several hosts: shared memory inside a host, PyTorch's Gloo between hosts."""
