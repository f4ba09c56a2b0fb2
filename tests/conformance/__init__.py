"""One suite for all communicators. `checks.py` holds what they must do, `run.py` runs it under mpiexec."""
