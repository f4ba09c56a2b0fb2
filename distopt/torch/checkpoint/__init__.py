"""Checkpoints of PyTorch's objects, and a sampler that resumes.

May import the package `distopt.checkpoint`, `distopt.data`, `ddp`, `tensors` and `private`. It works over any process
group, so it knows nothing of `group` and `hosts`.
"""
