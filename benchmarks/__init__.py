"""Measurements of distopt, and comparisons with other software: `python -m benchmarks --help`, from this checkout."""
