"""What scripts for SINGA define in its way: operators with `forward` and `backward` on raw tensors. Imports `core`."""
