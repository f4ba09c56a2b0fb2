"""Forms that scripts for SINGA expect: operators with `forward` and `backward` on raw tensors, and views of optimizers.

Imports `core`. Raw tensors themselves are in `core.raw`, since every tensor has one as its `data`.
"""
