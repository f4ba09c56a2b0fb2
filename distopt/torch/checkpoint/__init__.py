"""Checkpoints of PyTorch's objects, and a sampler that resumes."""
