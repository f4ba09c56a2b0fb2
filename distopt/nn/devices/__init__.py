"""Where arrays are: the CPU and the GPUs that this process can use. Imports nothing else of `nn`."""
