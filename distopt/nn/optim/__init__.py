"""Optimizers: update rules, hyperparameters, schedules, and the accumulation of gradients over several losses.

Imports `core` and `numerics`; never knows a layer or another rank. A new rule is a class in `rules`, and its name in
the `__all__` there; so is a schedule in `schedules`.
"""
