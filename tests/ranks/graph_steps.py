"""Training with and without `use_graph`, for ranks that the tests start: both must give the same bits."""

import contextlib
import gc
import logging
import re
import weakref
from logging.handlers import QueueHandler
from queue import SimpleQueue

import numpy as np
import pytest

from distopt import autograd, layer, model, opt, tensor
from distopt.codecs import Fp32
from distopt.errors import GradientError, UsageError
from distopt.nn.replay.capture import Capture
from tests.ranks.small_net import SMALL, STRATEGIES, beside, parameters, states
from tests.users_rules import ByApply, ByHook

CLASSES, BATCH = 5, 6
BEFORE = 3  # steps without a replay: two run eagerly and one is captured


class Net(model.Model):
    """All kinds of work: products, kernels, arithmetic of arrays with numbers, running states."""

    strategy: object = Fp32()

    def __init__(self) -> None:
        super().__init__()
        self.conv = layer.Conv2d(7, 3, padding=1, activation="RELU", pool=layer.MaxPool2d(2, 2))
        self.norm = layer.BatchNorm2d()
        self.flatten = layer.Flatten()
        self.linear1 = layer.Linear(29, activation="RELU")
        self.linear2 = layer.Linear(CLASSES)
        self.loss = layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.linear2(self.linear1(self.flatten(self.norm(self.conv(x))))) * 1.25

    def cost(self, out, y, scale=1.0):
        return self.loss(out, y) * scale + self.penalty()

    def penalty(self):
        return autograd.reduce_mean(self.linear1.W * self.linear1.W, keepdims=False).reshape((1,))

    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = self.cost(out, y)
        self.step(loss)
        return out, loss

    def step(self, loss):
        if self.strategy == "partialUpdate":
            self.optimizer.step_by("partialUpdate", loss)
        else:
            self.optimizer.reduce_and_update(loss, self.strategy, SMALL)


class Unnormed(Net):
    """Without states that a step leaves behind even if it is skipped."""

    def forward(self, x):
        return self.linear2(self.linear1(self.flatten(self.conv(x))))


def batch(step: int, optimizer, size: int = BATCH) -> tuple[tensor.Tensor, tensor.Tensor]:
    rng = np.random.default_rng([step, optimizer.global_rank])
    x, y = rng.standard_normal((size, 2, 6, 6), np.float32), rng.integers(0, CLASSES, size)
    return tensor.from_numpy(x, optimizer.device), tensor.from_numpy(y, optimizer.device)


def decaying_sgd() -> opt.SGD:
    return opt.SGD(lr=opt.ExponentialDecay(0.05, 3, 0.9), momentum=0.5)


def build(optimizer, use_graph: bool, kind: type[Net] = Net, rule=decaying_sgd, **options):
    """A new optimizer on the same communicator, and a new net that it trains."""
    optimizer = beside(optimizer, rule(), partition_elements=100, **options)
    optimizer.device.SetRandSeed(3)
    net = kind()
    net.set_optimizer(optimizer)
    net.compile([batch(0, optimizer)[0]], is_train=True, use_graph=use_graph)
    return optimizer, net


def equal_with_and_without(optimizer, train, key: str, replays: int | range, **options) -> dict[str, np.ndarray]:
    """Run `train(optimizer, net)` with so many replays of graphs, after a check that it gives the same bits without."""
    results = []
    for use_graph in (False, True):
        own, net = build(optimizer, use_graph, **options)
        values = train(own, net)
        own.synchronize()
        results.append((np.array(values), states(net)))
        assert use_graph or not net.graph_replays
    for eager, captured in zip(*results, strict=True):
        np.testing.assert_array_equal(captured, eager, err_msg=key)
    assert np.isfinite(results[1][1]).all()
    assert net.graph_replays in ([replays] if isinstance(replays, int) else replays), key
    return {f"{key} losses": results[1][0], key: parameters(net)}


def learn(own, net, n: int, size: int = BATCH) -> float:
    """The loss of a step."""
    return net(*batch(n, own, size))[1].item()


def steps(count: int, strategy=None):
    """Training for so many steps, and by this strategy instead of the net's own: the losses."""

    def train(own, net):
        net.strategy = strategy or net.strategy
        return [learn(own, net, n) for n in range(count)]

    return train


def every_strategy(optimizer) -> dict[str, np.ndarray]:
    results = {}
    for name, strategy in STRATEGIES.items():
        results |= equal_with_and_without(optimizer, steps(BEFORE + 4, strategy), name, 4)
    return results


def every_rule(optimizer) -> dict[str, np.ndarray]:
    results, adam = {}, lambda: opt.Adam(lr=opt.ExponentialDecay(0.01, 2, 0.8))
    for rule in (adam, lambda: opt.RMSProp(lr=0.01), opt.AdaGrad, ByApply, lambda: ByHook(0.05)):
        results |= equal_with_and_without(optimizer, steps(BEFORE + 3), type(rule()).__name__, 3, rule=rule)
    return results


class Plain(Net):
    def step(self, loss):
        self.optimizer(loss)


class InTwoCalls(Net):
    def step(self, loss):
        self.optimizer.call(loss)
        self.optimizer.step()
        self.optimizer.weight_decay = 0.01


def plain_optimizer(optimizer) -> dict[str, np.ndarray]:
    """Without DistOpt: one piece for the whole backward pass, and later calls that are made in replays, too."""

    def train(own, net):
        rule = decaying_sgd()
        net.set_optimizer(rule)
        values = steps(BEFORE + 4)(own, net)
        return [*values, rule.step_counter.item(), rule.values["weight_decay"]]

    for kind in (Plain, InTwoCalls):
        equal_with_and_without(optimizer, train, kind.__name__, 4, kind=kind)
    return {}


def overlap(optimizer) -> dict[str, np.ndarray]:
    """Each bucket is sent as soon as its piece is launched, before the next one is."""
    own, net = build(optimizer, True)
    runtime, events = own.device.xp.cuda.runtime, []
    launch = runtime.graphLaunch

    class Sends(Fp32):
        def reduce(self, state):
            events.append("send")
            return super().reduce(state)

    net.strategy = Sends()
    for n in range(BEFORE):
        net(*batch(n, own))
    events.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "graphLaunch", lambda *args: events.append("launch") or launch(*args))
        net(*batch(BEFORE, own))
    assert net.graph_replays == 1
    # The forward pass, and then the pieces of the backward pass; an operation may fill two buckets at a time.
    assert re.fullmatch("launch( launch( send)+){2,}", " ".join(events)), events
    assert events.count("send") == len({label for label, _ in own.stats().buckets})
    return {}


def memory_goes(optimizer) -> dict[str, np.ndarray]:
    """A graph that is dropped gives its memory back at once, without the garbage collector."""
    own, net = build(optimizer, True)
    for n in range(BEFORE + 1):
        net(*batch(n, own))
    gc.collect()
    gc.disable()
    captures = weakref.WeakSet(each for each in gc.get_objects() if isinstance(each, Capture))  # which hold memory
    assert len(captures) == 1
    own.device.ResetGraph()
    net(*batch(0, own))
    assert not captures
    gc.enable()
    return {}


def wrong_label(optimizer) -> dict[str, np.ndarray]:
    """A label outside the classes is found in a replay as in any step; training then continues."""

    def train(own, net):
        values = steps(BEFORE + 1)(own, net)
        x, y = batch(BEFORE + 1, own)
        y.array[2] = CLASSES + own.global_rank
        with pytest.raises((UsageError, GradientError), match=f"label {CLASSES + own.global_rank} of sample 2"):  # noqa: PT012
            net(x, y)
            own.get_states()  # where a GPU has the verdict on the step
        return [*values, *(learn(own, net, n) for n in range(BEFORE + 2, BEFORE + 4))]

    return equal_with_and_without(optimizer, train, "label", 4, kind=Unnormed)


def a_life(optimizer) -> dict[str, np.ndarray]:
    """Last batches of another size, evaluation, states that are loaded, results that are kept."""

    def train(own, net):
        kept, values, saved = [], [], None
        for epoch in range(5):
            net.train()
            kept += [net(*batch(10 * epoch + n, own))[0] for n in range(3)]
            values.append(learn(own, net, 10 * epoch + 3, 4))
            net.eval()
            values.append(float(net(batch(99, own)[0]).to_numpy().sum()))
            if epoch == 1:
                weights = {name: value.to_numpy() for name, value in net.get_states().items()}
                saved = weights, own.get_states()
            if epoch == 3:
                net.set_states(saved[0])
                own.set_states(saved[1])
        values += [float(np.abs(out.to_numpy()).sum()) for out in kept]
        assert len(set(values[-len(kept) :])) > len(kept) - 4, "all of them differ, but where states were loaded"
        return values

    return equal_with_and_without(optimizer, train, "life", 5 * 4 - 2 * BEFORE)


def skipped(optimizer) -> dict[str, np.ndarray]:
    """A step whose gradients are NaN on one rank is left out by all."""

    def train(own, net):
        values = []
        for n in range(BEFORE + 4):
            x, y = batch(n, own)
            if n in (1, BEFORE, BEFORE + 2) and own.global_rank == 0:
                x.array[2] = np.nan
            values.append(net(x, y)[1].item())
        assert own.stats().skipped == 3
        return np.nan_to_num(values)

    return equal_with_and_without(optimizer, train, "skip", 4, kind=Unnormed, non_finite="skip")


def joined(optimizer) -> dict[str, np.ndarray]:
    """Ranks with different numbers of batches."""

    replays = 2 + 3 * optimizer.global_rank

    def train(own, net):
        with own.join():
            return steps(BEFORE + replays)(own, net)

    return equal_with_and_without(optimizer, train, "join", replays, kind=Unnormed)


def accumulated(optimizer) -> dict[str, np.ndarray]:
    """Gradients that are only added, and steps that take the sum, clipped: one graph serves for both."""
    results = {}
    for name in ("fp32", "top-K", "partial"):

        def train(own, net, name=name):
            net.strategy = STRATEGIES[name]
            values = []
            for n in range(BEFORE + 7):
                with own.no_sync() if n % 3 < 2 else contextlib.nullcontext():
                    values.append(learn(own, net, n))
            assert own.grad_norm > 0.3
            return [*values, own.grad_norm]

        results |= equal_with_and_without(optimizer, train, name, 7, clip_grad_norm=0.3)
    return results


def frozen(optimizer) -> dict[str, np.ndarray]:
    """Layers that cease to train, and begin to again: each time, the step is captured anew."""

    def train(own, net):
        values = []
        for n in range(3 * (BEFORE + 2)):
            if n % (BEFORE + 2) == 0:
                net.conv.W.requires_grad = net.linear1.W.requires_grad = n != BEFORE + 2
                before = [net.conv.W.to_numpy(), net.linear1.W.to_numpy()]
            values.append(learn(own, net, n))
            for param, array in zip((net.conv.W, net.linear1.W), before, strict=True):
                assert np.array_equal(param.to_numpy(), array) == (not net.conv.W.requires_grad)
        return values

    return equal_with_and_without(optimizer, train, "frozen", 2)


def moved(optimizer) -> dict[str, np.ndarray]:
    """Another bucket size, and at last one that changes at every step, which is not captured again and again."""

    def train(own, net):
        values = []
        for n in range(30):
            own.bucket_elements = SMALL if n < 6 else 50 if n < 12 else 40 + n % 3
            values.append(learn(own, net, n))
        return values

    return equal_with_and_without(optimizer, train, "moved", range(7, 20), kind=Plain)


def other_arguments(optimizer) -> dict[str, np.ndarray]:
    """Each kind of arguments has its own graph; too many kinds, and those without a hash, run as ever."""

    class Scaled(Net):
        def train_one_batch(self, x, y, scale=1.0, *, unused=None):
            out = self.forward(x)
            loss = self.cost(out, y, scale)
            self.step(loss)
            return {"out": out, "rest": [loss, None]}

    def train(own, net):
        values = [net(*batch(n, own), 1.0 + n % 2)["rest"][0].item() for n in range(2 * BEFORE + 4)]
        values += [net(*batch(n, own), unused=[])["rest"][0].item() for n in range(2)]
        values += [net(*batch(n, own), n / 7)["rest"][0].item() for n in range(20)]
        own.device.ResetGraph()
        assert net.graph_replays in (0, 2 * 2 + 2)
        values += [net(*batch(n, own))["rest"][0].item() for n in range(BEFORE + 2)]
        return values

    return equal_with_and_without(optimizer, train, "arguments", 2, kind=Scaled)  # the others were dropped


# -- steps that cannot be captured -------------------------------------------------------------------------------------
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


BODIES = (every_strategy, every_rule, plain_optimizer, overlap, a_life, skipped, joined)
BODIES += (accumulated, frozen, memory_goes, wrong_label, moved, other_arguments, refused)
