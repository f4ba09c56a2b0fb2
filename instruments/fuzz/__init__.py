"""Random programs against slow oracles; what fails shrinks to a short script. `python -m instruments.fuzz --help`."""
