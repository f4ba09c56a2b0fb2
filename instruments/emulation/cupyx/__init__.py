"""A stand-in for CuPy's second package; see `cupy`."""
