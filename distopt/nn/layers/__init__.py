"""Layers, whose first input determines the shapes of their parameters; and initial values of parameters.

Imports `ops` and the packages below; never knows an optimizer or another rank: `SyncBatchNorm2d` receives a function
that sums over the ranks. A new layer is a class in the file of its subject, and its name in that file's `__all__`.
"""
