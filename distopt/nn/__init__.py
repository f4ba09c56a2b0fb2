"""Tensors, autograd, layers, models and optimizers over NumPy and CuPy; independent of other ranks."""
