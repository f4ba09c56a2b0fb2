"""The process group of `torch.distributed`: its operations, their order, their works and futures, and its messages."""
