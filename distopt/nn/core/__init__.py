"""Tensors, the base of the operations that compute them, and the backward pass.

Imports `numerics` and `devices` of `nn` only; never knows a layer, an optimizer or another rank.
"""
