"""Which samples each rank trains on."""

from .sampler import ShardedSampler, data_partition

__all__ = ["ShardedSampler", "data_partition"]
