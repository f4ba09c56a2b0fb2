"""Tensors, operations, layers, models and optimizers over NumPy and CuPy.

Imports go down: `model`; `layers`, `ops`, `optim`, `replay`, `staging`; `singa`; `core`; `kernels`; `devices`. From
outside, the room imports errors, settings, files and `distopt.kernels`. It never knows another rank, launcher or codec.
"""
