"""Programs that search for faults by the hour, count, measure and pack; tests/ has what must hold after each change.

docs/reference/testing.md and docs/results/gpu.md have the command of each.
"""
