"""The CPU, and the GPUs that this process can use. Imports nothing else of `nn`; never knows a tensor."""
