// Filled by the NCCL work.
