"""Tensors, operations, layers, models and optimizers over NumPy and CuPy.

Imports go down: `model`; `layers`, `ops`, `optim`, `replay`, `staging`; `core`; `numerics`; `devices`. Else the
package imports errors, settings, files and `distopt.kernels`. It never knows another rank, launcher or codec.
Its functions are local unless they say Collective.
"""
