"""The ranks of a job end together, under any launcher: each notices the end of the others, and reports its own.

Imports only modules beside this package. Never knows how a rank found its job.
"""
