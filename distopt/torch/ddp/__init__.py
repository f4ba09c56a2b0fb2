"""For DistributedDataParallel: buckets in shared memory, the order of buckets, and SyncBatchNorm."""
