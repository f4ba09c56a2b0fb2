"""Operators as scripts for SINGA define them, by `forward` and `backward` on raw tensors.

Imports `core`. Raw tensors themselves are in `core.raw`, since every tensor has one as its `data`.
"""
