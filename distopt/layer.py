"""SINGA's `layer` module."""

from .nn.layer import *  # noqa: F403 - a face of that module
