"""MNIST, digits generated in its place, and the preparation of images."""

from . import mnist
from .augment import normalize, random_shift

__all__ = ["mnist", "normalize", "random_shift"]
