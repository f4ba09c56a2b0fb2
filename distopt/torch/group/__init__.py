"""The process group of `torch.distributed`: operations and their order, works and futures, messages.

May import `hosts`, `ddp.shared_buckets`, `tensors`, `errors` and `private`. It gets its communicators from `join`, and
does not know how the ranks have found each other.
"""
