"""How the ranks of a job find each other, and exchange their first bytes.

Imports `launchers` and `end_together`. Never knows the `Job` that results.
"""
