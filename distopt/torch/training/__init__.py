"""Codecs for PyTorch: a hook of DDP, an optimizer that wraps another one, and local updates.

All three feed the engine of `engine`. The ranks are those of any process group; gradients travel by a communicator of
distopt's: shared memory and UCX on CPUs, NCCL on GPUs.
"""
