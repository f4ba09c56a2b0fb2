"""Training steps that cannot be captured in CUDA graphs, for ranks that the tests start."""

import logging

import numpy as np

from distopt import autograd, layer, tensor
from tests.ranks.graph_steps import BEFORE, Net, batch, equal_with_and_without


class WithDropout(Net):
    def forward(self, x):
        return super().forward(autograd.dropout(x, 0.5))


class ReadsForward(Net):
    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = self.loss(out, y) * (1.0 if out.array.sum() > 1e9 else 0.5)
        self.step(loss)
        return out, loss


class ReducesForward(Net):
    """A collective of its own between the layers; the gradient does not see it."""

    def forward(self, x):
        total = x.clone()
        if self.training:
            self.optimizer.communicator.all_reduce(total.array).wait()
        return super().forward(x)


class Synchronizes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = layer.SyncBatchNorm2d()


class Multiplies(Net):
    """By CuPy's own product, which calls cuBLAS."""

    square = None

    def forward(self, x):
        if self.square is None:
            self.square = tensor.from_numpy(np.eye(5, dtype=np.float32), x.device)
        return autograd.matmul(super().forward(x), self.square)


class CopiesFromHost(Net):
    """From pinned memory, so that nothing waits."""

    pinned = None

    def forward(self, x):
        out, cuda = super().forward(x), x.device.xp.cuda
        if self.pinned is None:
            memory = cuda.alloc_pinned_memory(out.array.nbytes)
            self.pinned = np.frombuffer(memory, np.float32, out.size()).reshape(out.shape)
            self.pinned[...] = 2
        return self.copied(out, cuda.get_current_stream())

    def copied(self, out, stream):
        factor = tensor.Tensor(out.shape, out.device)
        factor.array.set(self.pinned, stream)
        return out * factor


class CopiesToHost(CopiesFromHost):
    def copied(self, out, stream):
        out.array.get(stream, out=self.pinned, blocking=False)
        return out


class _ReadsBackward(autograd.Operation):
    def forward(self, x):
        return x * x.dtype.type(2)

    def gradients(self, dy, into):
        return (dy * dy.dtype.type(2 if float(dy.sum()) > -1e9 else 3),)


class ReadsBackward(Net):
    def forward(self, x):
        return self.linear2(_ReadsBackward()(self.linear1(self.flatten(self.norm(self.conv(x))))))


class StepsTwice(Net):
    def train_one_batch(self, x, y):
        for _ in range(2):
            out = self.forward(x)
            loss = self.loss(out, y)
            self.step(loss)
        return out, loss


class AsksBefore(Net):
    def train_one_batch(self, x, y):
        self.optimizer.stats()
        return super().train_one_batch(x, y)


class ComputesLater(Net):
    def train_one_batch(self, x, y):
        out, loss = super().train_one_batch(x, y)
        return out, loss * 1.0


class ReturnsANumber(Net):
    def train_one_batch(self, x, y):
        out, loss = super().train_one_batch(x, y)
        return out, loss, loss.item()


REFUSED = {
    WithDropout: "random numbers",
    ReadsForward: "",  # what CUDA says to that
    CopiesFromHost: "copies from the host",
    CopiesToHost: "copies to the host",
    Multiplies: "calling cuBLAS API during stream capture",
    ReducesForward: "a collective cannot be captured",
    Synchronizes: "norm sums over ranks, which a CUDA graph cannot hold",
    ReadsBackward: "the backward pass",
    StepsTwice: "2 times",
    AsksBefore: "self.optimizer.stats before the forward pass is complete",
    ComputesLater: "not computed before the optimizer's step",
    ReturnsANumber: "returns a float",
}


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def refused(optimizer) -> dict[str, np.ndarray]:
    """The log says why, and training is right."""
    kinds, results = dict(REFUSED), {}
    if optimizer.world_size == 1:
        del kinds[ReducesForward]  # it does nothing
    for kind, reason in kinds.items():
        log = _Records()
        logging.getLogger("distopt").addHandler(log)

        def train(own, net):
            return [net(*batch(n, own))[1].item() for n in range(BEFORE + 3)]

        found, net = equal_with_and_without(optimizer, train, kind.__name__, kind=kind)
        logging.getLogger("distopt").removeHandler(log)
        told = [text for text in log.texts if "use_graph=True" in text]
        assert len(told) == 1, (kind, told)
        assert reason in told[0], (kind, told)
        assert not net.graph_replays
        results |= found
    return results
