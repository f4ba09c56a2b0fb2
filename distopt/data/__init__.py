"""Data sets, and the distribution of samples among ranks."""

from . import mnist
from .augment import normalize, random_shift
from .sampler import ShardedSampler, data_partition

__all__ = ["ShardedSampler", "data_partition", "mnist", "normalize", "random_shift"]
