"""States that cannot be used are refused by a StateError, and nothing was changed: no part of them was taken over."""

import numpy as np
import pytest

from distopt import opt, tensor
from distopt.checkpoint import adapters
from distopt.data import ShardedSampler
from distopt.errors import StateError, UsageError
from distopt.nn.core.tensor import Tensor
from tests.ranks.small_net import Net

BAD = [
    float("nan"),
    float("inf"),
    -3,
    1.5,
    2**80,
    "text",
    b"text",
    None,
    [1, 2],
    {"a": 1},
    1j,
    np.array(np.nan),
    np.array(-3),
    np.array(1.5),
    np.array(2**63, np.uint64),
    np.array("text"),
    np.array(["a", "b"]),
    np.array([None, 1], object),
    np.full(5, np.nan),
]


def trained(optimizer):
    net = Net(6, 3)
    net.set_optimizer(optimizer)
    x = tensor.from_numpy(np.arange(8, dtype=np.float32).reshape(2, 4))
    net.compile([x], is_train=True, use_graph=False, sequential=False)
    net.train()
    for _ in range(2):
        net(x, tensor.from_numpy(np.array([0, 2], np.int32)))
    return net


def sgd():
    return opt.SGD(lr=opt.ExponentialDecay(0.1, 2, 0.5), momentum=0.9)


def of_sgd():
    rule = sgd()
    trained(rule)
    return rule


def of_dist_opt():
    dist = opt.DistOpt(sgd())
    trained(dist)
    return dist


MAKERS = {
    "SGD": of_sgd,
    "DistOpt": of_dist_opt,
    "model": lambda: trained(sgd()),
    "sampler": lambda: ShardedSampler(20, 2, 0, 3),
}


def copies(thing) -> dict[str, np.ndarray]:
    return {key: np.array(x.to_numpy() if isinstance(x, Tensor) else x) for key, x in thing.get_states().items()}


@pytest.mark.parametrize("name", MAKERS)
def test_each_state_in_turn_is_something_else(name):
    thing = MAKERS[name]()
    before = copies(thing)
    good = {key: x if name == "sampler" else before[key] for key, x in thing.get_states().items()}
    for key in good:
        for bad in BAD:
            states = {k: bad if k == key else x for k, x in reversed(list(good.items()))}
            for refuse in (thing.set_states, *([thing.check_states] if hasattr(thing, "check_states") else [])):
                with pytest.raises(StateError):
                    refuse(states)
            after = copies(thing)
            assert after.keys() == before.keys()
            for k, array in before.items():
                np.testing.assert_array_equal(after[k], array, err_msg=f"{k} after {key} = {bad!r}")
    thing.set_states(good)


def test_an_optimizer_that_knows_no_parameter_yet_refuses_them_too():
    good = of_sgd().get_states()
    slot = next(key for key in good if ":" in key)
    for bad in BAD:
        if getattr(bad, "dtype", np.dtype(int)).kind == "f":
            continue  # an array of floats of the wrong shape is found when its parameter comes
        fresh = sgd()
        with pytest.raises(StateError, match=slot):
            fresh.set_states({**good, slot: bad})
        assert fresh.get_states() == {"step_counter": 0}


@pytest.mark.parametrize("consumed", [40, 10**9])
def test_a_sampler_cannot_have_consumed_more_than_there_is(consumed):
    sampler = ShardedSampler(20, 2, 0, 3)
    with pytest.raises(StateError, match=f"consumed {consumed} of 20 samples"):
        sampler.set_states({**sampler.get_states(), "consumed": consumed})


@pytest.mark.parametrize("bad", ["text", None, [], {}, {"state": -1, "inc": 3}, {"state": np.nan, "inc": 3}], ids=str)
def test_a_random_generator_checks_its_whole_state(bad):
    generator = np.random.default_rng(7)
    before = generator.bit_generator.state
    (adapter,) = adapters.adapters_of({"noise": generator}).values()
    with pytest.raises(StateError, match="random generator"):
        adapter.check(adapters.State({}, {"": {**before, "state": bad}}))
    assert generator.bit_generator.state == before
    adapter.check(adapters.State({}, {"": before}))


def test_scalars_of_numpy_cannot_be_overwritten():
    with pytest.raises(UsageError, match="x is a float64, which cannot be saved"):
        adapters.adapters_of({"x": np.float64(3)})
