"""Training steps that are recorded once and then replayed: CUDA graphs on a GPU, calls of kernels on the CPU."""
