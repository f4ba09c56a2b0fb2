"""A rank that goes another way than the others is found and named, where results would else be wrong in silence."""

import functools
import operator
import os
import sys
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

import distopt
from distopt import opt, singa_wrap, tensor
from distopt.codecs import ErrorFeedback, Fp16, Fp32, TopK
from distopt.errors import CommunicatorError, UsageError
from instruments.emulation import activate
from instruments.emulation import build as emulator
from tests.conformance.ranks import run_ranks_ok
from tests.parts import values_beside
from tests.processes import mpiexec
from tests.ranks.small_net import SMALL, Net, batch, build, by_hand, step_of

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

STRATEGIES = {"fp32": Fp32(), "fp16": Fp16(), "top-K": ErrorFeedback(TopK(0.1)), "partial": "partialUpdate"}
STEPS, LATER, EVERY = 8, 5, 2
SIZES = {"bucket_elements": SMALL, "partition_elements": SMALL}


class Trainer:
    """A net that is trained in one of the ways: a strategy, or by hand."""

    def __init__(self, optimizer, way: str) -> None:
        self.optimizer, self.net = optimizer, build(optimizer)
        by_strategy = step_of(optimizer, STRATEGIES.get(way))
        self.step = functools.partial(by_hand, optimizer) if way == "by hand" else by_strategy

    def train(self, *numbers: int) -> None:
        for number in numbers:
            self.net(*batch(number, self.optimizer.global_rank, self.optimizer.device), self.step)

    @property
    def weights(self):
        return self.net.linear1.W


def go(case: str, odd: bool, **options) -> str:
    """Go one way, BODY/WHAT/WAY: the text of the error in which it ends."""
    body, *words = case.split("/")
    try:
        globals()[body](functools.partial(opt.DistOpt, **options, **SIZES), odd, *words)
    except (CommunicatorError, UsageError) as error:
        return str(error)
    return "no error"


def enter(job, tickets) -> list[str]:
    place = {"local_rank": job.topology.rank, "world_size": job.topology.world_size}
    odd = job.topology.rank == job.topology.world_size - 1
    return [go(case, odd, nccl_id=ticket, **place) for case, ticket in tickets.items()]


def run(world_size, cases) -> dict[str, tuple[str, ...]]:
    """Each rank's outcome, by case."""
    ends = run_ranks_ok(enter, world_size, {case: singa_wrap.NcclIdHolder() for case in cases})
    return dict(zip(cases, zip(*ends, strict=True), strict=True))


def assert_named(ends: Sequence[str], parts: Iterable[str]) -> None:
    """Every rank's error must name the last rank and contain `parts`."""
    for end in ends:
        for part in (f"rank {len(ends) - 1} (", *parts):
            assert part in end, ends


# -- rules and constants -----------------------------------------------------------------------------------------------
def sgd(**changes):
    return opt.SGD(**{"lr": 0.05, "momentum": 0.5, **changes})


# The last rank's rule instead of `sgd()`, and a part of the message.
OTHER_RULES = {
    "lr": (lambda: sgd(lr=0.05000001), "lr is 0.05000001 there, 0.05 on rank 0;"),
    "momentum": (lambda: sgd(momentum=0.25), "momentum is 0.25 there, 0.5 on rank 0;"),
    "weight decay": (lambda: sgd(weight_decay=1e-5), "weight_decay is 1e-05 there, 0.0 on rank 0;"),
    "nesterov": (lambda: sgd(nesterov=True), "nesterov is True there, False on rank 0;"),
    "clipping": (lambda: sgd(clip_grad_norm=1.0), "clip_grad_norm is 1.0 there, None on rank 0;"),
    "rule": (lambda: opt.Adam(lr=0.05), "optimizer is 'Adam' there, 'SGD' on rank 0, momentum is absent there, 0.5"),
    "schedule": (lambda: sgd(lr=opt.ExponentialDecay(0.04, 9, 0.5)), "lr is 0.04 there, 0.05 on rank 0;"),
}


def other_rule(create, odd, rule, way):
    trainer = Trainer(create(OTHER_RULES[rule][0]() if odd else sgd()), way)
    trainer.train(0)


def assign(name, value):
    return lambda optimizer: setattr(optimizer, name, value)


# The last rank's change before step `LATER`, and a part of the message.
CHANGES = {
    "lr": (assign("lr", 0.01), "now lr = 0.01; "),
    "lr of one step": (assign("lr_value", 0.03), "now lr = 0.03; "),
    "momentum": (assign("momentum", 0.75), "now momentum = 0.75; "),
    "nesterov": (assign("nesterov", True), "now nesterov = True; "),
    "clipping": (assign("clip_grad_norm", 2.0), "now clip_grad_norm = 2; "),
    "rule": (assign("opt", opt.RMSProp(lr=0.05)), "now optimizer = RMSProp"),
    "schedule": (assign("lr", opt.StepDecay(0.05, [LATER])), "now lr = 0.005; "),
    "step counter": (lambda optimizer: optimizer.opt.step(), f"now step_counter = {LATER + 1}; "),
}


def change(create, odd, what, way):
    trainer = Trainer(create(sgd()), way)
    trainer.train(*range(LATER))
    if odd:
        CHANGES[what][0](trainer.optimizer)
    trainer.train(LATER)


# -- parameters --------------------------------------------------------------------------------------------------------
def flip(array, bit):
    """One bit of the last element."""
    array.reshape(-1)[-1:].view(np.uint32)[...] ^= np.uint32(1 << bit)


# Changes to linear1.W of the last rank.
SPOILED = {
    "a low bit": lambda param: flip(param.array, 8),
    "sign": lambda param: flip(param.array, 31),
    "all signs": lambda param: operator.imul(param.array, -1),
    "order": lambda param: np.copyto(param.array, param.array[::-1].copy()),
    "another array": lambda param: setattr(param, "array", param.array * np.float32(0.5)),
    "other raw data": lambda param: setattr(param, "data", np.zeros_like(param.array)),
    "another value": lambda param: param.set_value(0.25),
    "other data": lambda param: param.copy_from_numpy(np.ones(param.shape, np.float32)),
}


def spoil(create, odd, what, way):
    trainer = Trainer(create(sgd(), check_every=EVERY), way)
    trainer.train(*range(LATER))
    if odd:
        SPOILED[what](trainer.weights)
    trainer.train(*range(LATER, LATER + EVERY))


def loaded_alone(create, odd, _, way):
    """As in a script that loads states on one rank only, after `compile`."""
    trainer = Trainer(create(sgd()), way)
    if odd:
        flip(trainer.net.linear2.b.array, 3)
    trainer.train(0)


def other_tensor(create, odd, _, way):
    """A parameter is another tensor, which layers refuse if they are asked."""
    trainer = Trainer(create(sgd()), way)
    if odd:
        replacement = tensor.Tensor(data=trainer.weights.array, stores_grad=True, name="linear1.W")
        object.__setattr__(trainer.net.linear1, "W", replacement)
    trainer.train(0)


def other_model(create, odd, *_):
    net = Net(hidden=31 + odd)
    net.set_optimizer(create(sgd()))
    net.compile([batch(0, 0)[0]], is_train=True)


def allowed(create, odd, what, way):
    """What all ranks do alike, and partial updates, are no drift: nothing raises."""
    every = 0 if what == "unchecked" else 1
    trainer = Trainer(create(sgd(lr=opt.CosineDecay(0.05, 9)), check_every=every), way)
    for number in range(STEPS):
        if odd and what in ("partial", "unchecked"):
            flip(trainer.weights.array, 20)
        if number == LATER:
            if what == "all change":
                trainer.optimizer.lr, trainer.optimizer.momentum = 0.01, 0.25
                trainer.weights.array *= 2
            if what == "all change rule":
                trainer.optimizer.opt = opt.Adam(lr=0.001)
            if what == "all load":
                states = trainer.optimizer.get_states()
                trainer.optimizer.set_states(states | {"optimizer/step_counter": np.array(1)})
            if what == "partial, then all":
                trainer.optimizer.synchronize()
                trainer.step = step_of(trainer.optimizer, Fp32())
        trainer.train(number)
    trainer.optimizer.communicator.barrier()


def other_interval(create, odd, _, way):
    trainer = Trainer(create(sgd(), check_every=7 if odd else 0), way)
    trainer.train(0)


# -- ranks with different numbers of batches --------------------------------------------------------------------------
def join(create, odd, what, way):
    trainer = Trainer(create(sgd()), way)
    if odd and what == "codec":
        trainer.step = step_of(trainer.optimizer, Fp16())
    with trainer.optimizer.join():
        if what == "nested":
            with trainer.optimizer.join():
                pass
        if odd and what == "raise":
            raise UsageError(f"rank {trainer.optimizer.global_rank} (this one) is the cause")
        trainer.train(*range(0 if odd and what == "no batch" else 2))


def change_while_one_waits(create, odd, _, way):
    trainer = Trainer(create(sgd(lr=opt.CosineDecay(0.1, 9)), check_every=1), way)
    with trainer.optimizer.join():
        for number in range(2 if odd else 5):
            if number == 3:
                trainer.optimizer.lr = 0.01
            trainer.train(number)


# -- two of them -------------------------------------------------------------------------------------------------------
def two(create, odd, when, way):
    """Two nets of one kind, on one communicator; the last rank takes them in another order."""
    first = create(sgd())
    second = opt.DistOpt(sgd(), communicator=first.communicator, **SIZES)
    optimizers = [first, second]
    if odd and when == "attach":
        optimizers.reverse()
    trainers = [Trainer(optimizer, way) for optimizer in optimizers]
    for number in range(STEPS):
        if odd and when == ("first step", "later")[number > 0] and number in (0, LATER):
            trainers.reverse()
        for trainer in trainers:
            trainer.train(number)
    if when == "synchronize":
        for optimizer in reversed(optimizers) if odd else optimizers:
            optimizer.synchronize()


# -- the cases ---------------------------------------------------------------------------------------------------------
EQUAL = ["fp32", "fp16", "top-K"]  # ways that keep parameters equal
OPTIMIZER = "make the same optimizer"
ASSIGNMENTS = "make the same assignments on all ranks"
PARAMETERS = "before step 6, parameter linear", "1.W", "change parameters equally on all ranks"
TENSOR = "has linear1.W of shape [21, 31] and type float32 of DistOpt.attach"
LOADED = "before step 0, parameter linear2.b has other values on rank", "than on rank 0 ("
SECOND = "uses the DistOpt that it made as number 2", "in the same order on all ranks"
# Of each case the parts of every rank's message, besides the name of the last rank.
NAMED: dict[str, tuple[str, ...]] = {
    **{f"change/{what}/{way}": (text, ASSIGNMENTS) for what, (_, text) in CHANGES.items() for way in STRATEGIES},
    **{f"change/{what}/by hand": (CHANGES[what][1], ASSIGNMENTS) for what in ("lr", "momentum")},
    **{f"other_rule/{what}/{way}": (text, OPTIMIZER) for what, (_, text) in OTHER_RULES.items() for way in STRATEGIES},
    **{f"spoil/{what}/{way}": PARAMETERS for what in SPOILED for way in EQUAL},
    **{f"loaded_alone//{way}": LOADED for way in EQUAL},
    **{f"other_tensor//{way}": (TENSOR,) for way in EQUAL},
    "other_interval//fp32": ("check_every is 7 there, 0 on rank 0",),
    "other_model//fp32": ("trains another model", "linear1.W of shape [21, 31]"),
    "join/no batch/fp32": ("has no batch at all",),
    "join/codec/fp32": ("reduces with another codec",),
    "join/raise/fp32": ("the cause",),
    "change_while_one_waits//fp32": ("now lr = 0.01; ", "now lr = 0.075"),  # the latter is that of the schedule
    **{f"two/{when}/{way}": SECOND for when in ("attach", "first step") for way in STRATEGIES},
    **{f"two/later/{way}": ("DistOpt 2: ",) for way in (*STRATEGIES, "by hand")},
    "two/attach/by hand": SECOND,
    "two/first step/by hand": ("DistOpt 2: ",),
    "two/synchronize/partial": ("DistOpt 2: ",),
}
# Of the others, in which no rank differs, what is in every message.
ALIKE = {
    **{f"allowed/{what}/partial": "no error" for what in ("partial", "partial, then all")},
    **{f"allowed/{what}/fp32": "no error" for what in ("unchecked", "all change", "all change rule", "all load")},
    "join/nested/fp32": "inside of DistOpt.join",
    "join//top-K": "use a codec without it",
    "join//partial": "partial updates need all ranks",
}
CASES = [*NAMED, *ALIKE]


@pytest.mark.sweep(rest=36)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "case", [case if case.startswith("change") else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_what_one_rank_does_otherwise_is_named(request, once, case, world_size):
    """One start of the ranks serves all cases that run."""
    ends = once(f"drift-{world_size}", run, world_size, values_beside(request, "case"))[case]
    if case in NAMED:
        assert_named(ends, NAMED[case])
    else:
        assert all(ALIKE[case] in end for end in ends), ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "part"), [("change/lr/fp32", "(now lr = 0.01; "), ("two/later/fp16", "(DistOpt 2: bucket ")]
)
def test_over_mpi(case, part):
    ended = mpiexec(3, "-m", "tests.ranks.test_drift", case, env={"DISTOPT_TRANSPORT": "mpi"})
    assert (ended.code, ended.stdout.count("rank 2 ("), ended.stdout.count(part)) == (0, 3, 3), ended


def on_emulated_gpu(create, odd, what, way):
    activate()
    os.environ["DISTOPT_DEVICE"] = "cuda"
    spoil(create, odd, what, way)


@pytest.mark.slow
def test_on_emulated_gpus():
    emulator.build()
    (ends,) = run(3, ["on_emulated_gpu/all signs/fp32"]).values()
    assert_named(ends, ["before step 6, parameter linear"])


if __name__ == "__main__":  # a rank of mpiexec, with the case that its argument names
    own_world = distopt.init()
    sys.stdout.write(f"{go(sys.argv[1], own_world.rank == own_world.world_size - 1)}\n")
