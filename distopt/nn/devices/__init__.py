"""The CPU, and the GPUs that this process can use. Imports only `notices` of `nn`; never knows a tensor."""
