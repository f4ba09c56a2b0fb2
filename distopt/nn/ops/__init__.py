"""Operations of networks: each file has the classes of one subject, and beside each the function that scripts call.

Imports `core` and the kernels; knows no layer.
"""
