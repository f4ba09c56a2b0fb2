"""Which samples each rank trains on.

The package imports only modules beside it. It takes ranks as numbers, and never knows of transports, devices or models.
Its functions are local.
"""

from .sampler import ShardedSampler, data_partition

__all__ = ["ShardedSampler", "data_partition"]
