"""The engine: it averages the gradients of named parameters over the ranks.

The package imports `codecs`, `comm` and `kernels`. It never knows where gradients come from: `nn` writes them through
`dist_opt.py`, and PyTorch may.
"""
