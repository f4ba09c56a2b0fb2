"""Training steps that cannot be captured in CUDA graphs, for ranks that the tests start."""

import logging
from logging.handlers import QueueHandler
from queue import SimpleQueue

import numpy as np

from distopt import autograd, layer, tensor
from tests.ranks.graph_steps import BATCH, BEFORE, CLASSES, Net, equal_with_and_without, steps


def reads(net, x, y):
    out = net.forward(x)
    loss = net.loss(out, y) * (1.0 if out.array.sum() > 1e9 else 0.5)
    net.step(loss)
    return out, loss


def reduces(net, x):
    """A collective of its own between the layers; the gradient does not see it."""
    total = x.clone()
    if net.training:
        net.optimizer.communicator.all_reduce(total.array).wait()
    return Net.forward(net, x)


def synchronizes(net):
    Net.__init__(net)
    net.norm = layer.SyncBatchNorm2d()


def multiplies(net, x):
    """By CuPy's own product, which calls cuBLAS."""
    if not hasattr(net, "square"):
        net.square = tensor.from_numpy(np.eye(5, dtype=np.float32), x.device)
    return autograd.matmul(Net.forward(net, x), net.square)


def pinned(net, out):
    """Memory of the host, for copies that nothing waits for."""
    if not hasattr(net, "pinned"):
        memory = out.device.xp.cuda.alloc_pinned_memory(out.array.nbytes)
        net.pinned = np.frombuffer(memory, np.float32, out.size()).reshape(out.shape)
        net.pinned[...] = 2
    return net.pinned


def copies_from_host(net, x):
    out, factor = Net.forward(net, x), tensor.Tensor((BATCH, CLASSES), x.device)
    factor.array.set(pinned(net, out), x.device.xp.cuda.get_current_stream())
    return out * factor


def copies_to_host(net, x):
    out = Net.forward(net, x)
    out.array.get(x.device.xp.cuda.get_current_stream(), out=pinned(net, out), blocking=False)
    return out


class _ReadsBackward(autograd.Operation):
    def forward(self, x):
        return x * x.dtype.type(2)

    def gradients(self, dy, into):
        return (dy * dy.dtype.type(2 if float(dy.sum()) > -1e9 else 3),)


def reads_backward(net, x):
    return net.linear2(_ReadsBackward()(net.linear1(net.flatten(net.norm(net.conv(x))))))


def steps_twice(net, x, y):
    Net.train_one_batch(net, x, y)
    return Net.train_one_batch(net, x, y)


def asks_before(net, x, y):
    net.optimizer.stats()
    return Net.train_one_batch(net, x, y)


def computes_later(net, x, y):
    out, loss = Net.train_one_batch(net, x, y)
    return out, loss * 1.0


def returns_a_number(net, x, y):
    out, loss = Net.train_one_batch(net, x, y)
    return out, loss, loss.item()


# The method that a net has of its own, and a part of the message.
REFUSED = [
    ("forward", lambda net, x: Net.forward(net, autograd.dropout(x, 0.5)), "random numbers"),
    ("train_one_batch", reads, ""),  # what CUDA says to that
    ("forward", copies_from_host, "copies from the host"),
    ("forward", copies_to_host, "copies to the host"),
    ("forward", multiplies, "calling cuBLAS API during stream capture"),
    ("forward", reduces, "a collective cannot be captured"),
    ("__init__", synchronizes, "norm sums over ranks, which a CUDA graph cannot hold"),
    ("forward", reads_backward, "the backward pass"),
    ("train_one_batch", steps_twice, "2 times"),
    ("train_one_batch", asks_before, "self.optimizer.stats before the forward pass is complete"),
    ("train_one_batch", computes_later, "not computed before the optimizer's step"),
    ("train_one_batch", returns_a_number, "returns a float"),
]


def refused(optimizer) -> dict[str, np.ndarray]:
    """The log says why, and training is right."""
    results = {}
    for name, method, reason in REFUSED:
        if method is reduces and optimizer.world_size == 1:
            continue  # it does nothing
        log, kind = QueueHandler(SimpleQueue()), type("Refused", (Net,), {name: method})
        logging.getLogger("distopt").addHandler(log)
        results |= equal_with_and_without(optimizer, steps(BEFORE + 3), reason, 0, kind=kind)
        logging.getLogger("distopt").removeHandler(log)
        texts = [log.queue.get().getMessage() for _ in range(log.queue.qsize())]
        (told,) = [text for text in texts if "use_graph=True" in text]
        assert reason in told, told
    return results
