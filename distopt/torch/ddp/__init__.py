"""Help for DistributedDataParallel: buckets in shared memory, the order of buckets, SyncBatchNorm, the model inside.

May import `distopt.comm` and `private`. It knows nothing of `group`: SyncBatchNorm and the order of buckets work over
any process group, and shared buckets get a function that posts operations.
"""
