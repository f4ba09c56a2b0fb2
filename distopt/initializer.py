"""SINGA's `initializer` module."""

from .nn.initializer import *  # noqa: F403 - a face of that module
