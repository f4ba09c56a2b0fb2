"""Data-parallel training in Python."""
