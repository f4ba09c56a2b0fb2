"""Recording and replay of training steps: CUDA graphs on a GPU, calls of kernels on the CPU."""
