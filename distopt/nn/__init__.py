"""Tensors, autograd, layers, models and optimizers over NumPy and CuPy; nothing here knows of other ranks."""
