"""Codecs for PyTorch: a hook of DDP, an optimizer that wraps another one, and local updates, all by the engine of `sync`.

The ranks are those of any process group for CPU tensors; their gradients travel by a communicator of distopt's.
"""
