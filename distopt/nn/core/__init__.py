"""Tensors, the operations that compute them, and the backward pass through what they have computed.

Imports kernels and devices only; knows no layer, no optimizer and no other rank.
"""
