"""Tensors, operations, layers, models and optimizers over NumPy and CuPy.

From below: `devices`, `kernels`, `core`, `ops`, `layers`; `optim` and `replay` stand on `core`; `model` on all of them.
This room imports errors, settings, files and flat kernels; it never knows another rank, a launcher or a codec.
"""
