"""Layers: operations with parameters whose shapes the first input gives, and the initial values of parameters.

Imports `ops` and what lies below; knows no optimizer and no other rank: `SyncBatchNorm2d` is given a sum over ranks.
"""
