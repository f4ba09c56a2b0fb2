"""Tensors, the base of the operations that compute them, and the backward pass.

Imports kernels and devices only; never knows a layer, an optimizer or another rank.
"""
