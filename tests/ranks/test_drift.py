"""A rank that goes another way than the others is found and named, where results would else be wrong in silence."""

import functools
import json
import operator
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import distopt
from distopt import launch, opt, singa_wrap, tensor
from distopt.codecs import ErrorFeedback, Fp16, Fp32, TopK
from distopt.errors import MismatchError, UsageError
from tests.emulation import activate
from tests.emulation import build as emulator
from tests.parts import cases_beside
from tests.processes import mpiexec
from tests.ranks.small_net import SMALL, batch, build, by_hand, step_of

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

STRATEGIES = {"fp32": Fp32(), "fp16": Fp16(), "top-K": ErrorFeedback(TopK(0.1)), "partial": "partialUpdate"}
STEPS, LATER, EVERY = 8, 5, 2


class Trainer:
    """A net that is trained in one of the ways: a strategy, or by hand."""

    def __init__(self, optimizer, way: str) -> None:
        self.optimizer = optimizer
        self.net = build(optimizer)
        self.step = (
            functools.partial(by_hand, optimizer) if way == "by hand" else step_of(optimizer, STRATEGIES.get(way))
        )

    def train(self, number: int) -> None:
        self.net(*batch(number, self.optimizer.global_rank, self.optimizer.device), self.step)

    @property
    def weights(self):
        return self.net.linear1.W


def enter(rank, world_size, tickets, folder, body) -> None:
    """Run `body` for each case; note the MismatchError in which it ends."""
    ends = {}
    for case, ticket in tickets.items():
        create = functools.partial(opt.DistOpt, nccl_id=ticket, local_rank=rank, world_size=world_size)
        create = functools.partial(create, bucket_elements=SMALL, partition_elements=SMALL)
        odd = rank == world_size - 1
        try:
            body(create, odd, *case.split("/"))
        except MismatchError as error:
            ends[case] = str(error)
        else:
            ends[case] = "no error"
    (Path(folder) / f"{rank}.json").write_text(json.dumps(ends))


def run(factory, world_size, body, cases) -> dict[str, list[str]]:
    """Each rank's outcome, by case."""
    folder = factory.mktemp("ends")
    launch.spawn(enter, world_size, ({case: singa_wrap.NcclIdHolder() for case in cases}, str(folder), body))
    ends = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    return {case: [end[case] for end in ends] for case in cases}


@pytest.fixture
def ends(request, once, tmp_path_factory):
    """`ends(body, *names)`: what each rank said at its end; the parameters `names` are the case.

    One start of the ranks serves all cases of a test that run.
    """

    def of_this_case(body, *names) -> list[str]:
        test, given = request.function.__name__, request.node.callspec.params
        cases = ["/".join(case) for case in cases_beside(request, *names)]
        world_size = given["world_size"]
        every = once(f"{test}-{world_size}", run, tmp_path_factory, world_size, body, cases)
        return every["/".join(given[name] for name in names)]

    return of_this_case


def assert_named(ends: list[str], *parts: str) -> None:
    """Every rank's error must name the last rank and contain `parts`."""
    for end in ends:
        for part in (f"rank {len(ends) - 1} (", *parts):
            assert part in end, ends


two_and_three = pytest.mark.parametrize("world_size", [2, 3])


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


@pytest.mark.slow
@pytest.mark.sweep(rest=6)
@two_and_three
@pytest.mark.parametrize("way", STRATEGIES)
@pytest.mark.parametrize("rule", OTHER_RULES)
def test_another_rule_on_one_rank_is_named_in_the_first_step(ends, rule, way, world_size):
    assert_named(ends(other_rule, "rule", "way"), OTHER_RULES[rule][1], "make the same optimizer")


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
    for number in range(LATER):
        trainer.train(number)
    if odd:
        CHANGES[what][0](trainer.optimizer)
    trainer.train(LATER)


@pytest.mark.sweep(rest=6)
@two_and_three
@pytest.mark.parametrize("way", STRATEGIES)
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_a_constant_on_one_rank_is_named_in_the_same_step(ends, what, way, world_size):
    assert_named(ends(change, "what", "way"), CHANGES[what][1], "make the same assignments on all ranks")


@pytest.mark.slow
@pytest.mark.sweep(rest=2)
@two_and_three
@pytest.mark.parametrize("way", ["by hand"])
@pytest.mark.parametrize("what", ["lr", "momentum"])
def test_a_change_on_one_rank_that_reduces_by_hand_is_named(ends, what, way, world_size):
    assert_named(ends(change, "what", "way"), CHANGES[what][1], "make the same assignments")


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
EQUAL = ["fp32", "fp16", "top-K"]  # ways that keep parameters equal


def spoil(create, odd, what, way):
    trainer = Trainer(create(sgd(), check_every=EVERY), way)
    for number in range(LATER):
        trainer.train(number)
    if odd:
        SPOILED[what](trainer.weights)
    for number in range(LATER, LATER + EVERY):
        trainer.train(number)


@pytest.mark.slow
@pytest.mark.sweep(rest=6)
@two_and_three
@pytest.mark.parametrize("way", EQUAL)
@pytest.mark.parametrize("what", SPOILED)
def test_parameters_that_differ_on_one_rank_are_named_within_so_many_steps(ends, what, way, world_size):
    assert_named(
        ends(spoil, "what", "way"), "before step 6, parameter linear", "1.W", "change parameters equally on all ranks"
    )


def loaded_alone(create, odd, way):
    """As in a script that loads states on one rank only, after `compile`."""
    trainer = Trainer(create(sgd()), way)
    if odd:
        flip(trainer.net.linear2.b.array, 3)
    trainer.train(0)


@pytest.mark.slow
@pytest.mark.sweep(rest=2)
@two_and_three
@pytest.mark.parametrize("way", EQUAL)
def test_parameters_that_differ_before_the_first_step_are_named(ends, way, world_size):
    assert_named(
        ends(loaded_alone, "way"), "before step 0, parameter linear2.b has other values on rank", "than on rank 0 ("
    )


def other_tensor(create, odd, way):
    """A parameter is another tensor, which layers refuse if they are asked."""
    trainer = Trainer(create(sgd()), way)
    if odd:
        replacement = tensor.Tensor(data=trainer.weights.array, stores_grad=True, name="linear1.W")
        object.__setattr__(trainer.net.linear1, "W", replacement)
    trainer.train(0)


@pytest.mark.slow
@pytest.mark.sweep(rest=2)
@two_and_three
@pytest.mark.parametrize("way", EQUAL)
def test_another_tensor_than_was_attached_is_named(ends, way, world_size):
    assert_named(ends(other_tensor, "way"), "has linear1.W of shape [21, 31] and type float32 of DistOpt.attach")


def allowed(create, odd, what):
    """Allowed changes: nothing raises."""
    every, way = {"unchecked": 0}.get(what, 1), "partial" if "partial" in what else "fp32"
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


ALLOWED = ["partial", "partial, then all", "unchecked", "all change", "all change rule", "all load"]


@pytest.mark.slow
@pytest.mark.sweep(rest=6)
@two_and_three
@pytest.mark.parametrize("what", ALLOWED)
def test_what_all_ranks_do_alike_and_partial_updates_are_no_drift(ends, what, world_size):
    assert set(ends(allowed, "what")) == {"no error"}


def other_interval(create, odd, how):
    trainer = Trainer(create(sgd(), check_every=7 if odd else 0), how)
    trainer.train(0)


@pytest.mark.slow
@two_and_three
@pytest.mark.parametrize("way", ["fp32"])
def test_another_interval_on_one_rank_is_named(ends, way, world_size):
    assert_named(ends(other_interval, "way"), "check_every is 7 there, 0 on rank 0")


@pytest.mark.parametrize("value", [-1, 2.5, True, None, "100"])
def test_an_interval_that_is_no_number_of_steps_is_refused(value):
    with pytest.raises(UsageError, match=r"check_every is .*; it must be an integer of at least 0"):
        opt.DistOpt(sgd(), check_every=value)


# -- two of them -------------------------------------------------------------------------------------------------------
def two(create, odd, when, way):
    """Two nets of one kind, on one communicator; the last rank takes them in another order."""
    first = create(sgd())
    second = opt.DistOpt(sgd(), communicator=first.communicator, bucket_elements=SMALL, partition_elements=SMALL)
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


WHEN = ["attach", "first step", "later"]
WAYS = [*STRATEGIES, "by hand"]


@pytest.mark.slow
@pytest.mark.sweep(rest=4)
@two_and_three
@pytest.mark.parametrize(("when", "way"), [*product(WHEN, WAYS), ("synchronize", "partial")])
def test_two_optimizers_in_another_order_on_one_rank_are_named(ends, when, way, world_size):
    told = ["uses the DistOpt that it made as number 2", "in the same order on all ranks"]
    if when in ("later", "synchronize") or (way == "by hand" and when == "first step"):
        told = ["DistOpt 2: "]
    assert_named(ends(two, "when", "way"), *told)


# -- other communicators -----------------------------------------------------------------------------------------------
MPI = {
    ("other_rule", "lr", "fp32"): OTHER_RULES["lr"][1],
    ("change", "lr", "fp32"): "(now lr = 0.01; ",
    ("change", "momentum", "partial"): "(now momentum = 0.75; ",
    ("spoil", "all signs", "top-K"): "before step 6, parameter linear",
    ("two", "later", "fp16"): "(DistOpt 2: bucket ",
}


@pytest.mark.slow
@pytest.mark.sweep(rest=3)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", MPI)
def test_over_mpi(case, world_size):
    ended = mpiexec(world_size, "-m", "tests.ranks.test_drift", *case, env={"DISTOPT_TRANSPORT": "mpi"})
    assert ended.code != 0
    assert "MismatchError" in ended.stderr
    assert f"rank {world_size - 1} " in ended.stderr
    assert MPI[case] in ended.stderr


def on_emulated_gpu(create, odd, function, *case):
    activate()
    globals()[function](create, odd, *case)


GPU = {"change/lr/fp32": "now lr = 0.01; ", "spoil/all signs/fp32": "before step 6, parameter linear"}


@pytest.mark.slow
@pytest.mark.sweep(rest=1)
@two_and_three
@pytest.mark.parametrize("case", GPU)
def test_on_emulated_gpus(ends, monkeypatch, case, world_size):
    emulator.build()
    monkeypatch.setenv("DISTOPT_DEVICE", "cuda")
    assert_named(ends(on_emulated_gpu, "case"), GPU[case])


if __name__ == "__main__":  # a rank of mpiexec, with the function and the case that its arguments name
    own_world = distopt.init()
    make = functools.partial(opt.DistOpt, bucket_elements=SMALL, partition_elements=SMALL)
    globals()[sys.argv[1]](make, own_world.rank == own_world.world_size - 1, *sys.argv[2:])
