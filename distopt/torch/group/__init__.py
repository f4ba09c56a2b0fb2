"""The process group of `torch.distributed`: operations and their order, works and futures, messages.

An operation passes through these files: PyTorch calls a method of `process_group`; `channels` gives the sequence of
operations that it belongs to; the `queue` of that channel carries out its operations one after the other, in the order
of the calls, which is the same on all ranks; `collectives` carries out each by a communicator. PyTorch gets a `work`,
whose `futures` run callbacks. Messages between two ranks (`messages`) have no order, and no queue.

The thread that carries out an operation:

- A call that waits, of a channel without other operations: the calling thread, at once. There is no queue entry.
- A call with `async_op` starts the operation in the calling thread, if that can be done without a wait and all earlier
  operations of the channel have started. It ends in its turn:

  - in a thread that calls `wait`, after all earlier operations of the channel;
  - if it was called in a backward pass, in the thread that computes: a callback at the end of the pass carries out all
    operations of the pass. So gradients are averaged without a switch of threads;
  - else in the thread of the queue, which takes over 2 ms after the call, or at once if Python code has asked for a
    future, or while this process waits for an operation of another group.

- A message starts in the calling thread. A thread of the group moves the messages that no thread waits for. A future
  of a message has a thread of its own, which waits for it.

The callbacks of futures run one at a time, in the order of their operations, in a thread that has just carried one out.
When they run depends on the rank. So the operations that they call belong to another channel: one for all callbacks of
operations of this channel, with a communicator of its own. One lock protects a queue; a thread holds it to look, never
while it waits for another rank.

May import `ddp.shared_buckets`, `tensors`, `errors` and `private`. It gets its communicators from `join`, and
does not know how the ranks have found each other.
"""
