"""Optimizers: rules, their hyperparameters and schedules, and sums of several gradients.

Imports `core` and the kernels; knows no layer, and of gradients neither where they come from nor who else has some.
"""
