"""Users' optimizers inside DistOpt: equal bits on all ranks, and those of the rule that is built in."""

from functools import partial

import numpy as np
import pytest

from distopt import opt
from tests.ranks.small_net import SMALL, Net, assert_equal_bits, batch, build, by_hand, on_ranks, parameters
from tests.users_rules import ByApply, ByHook, WithStates, built_in

STEPS = 4
OPTIONS = ("plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold")


def schedule() -> opt.DecayScheduler:
    return opt.ExponentialDecay(0.05, 2, 0.5)


def trained(communicator, rule, options) -> np.ndarray:
    """The parameters after some steps of each of the options in turn."""
    optimizer = opt.DistOpt(rule, communicator=communicator, bucket_elements=SMALL, partition_elements=SMALL)
    net: Net = build(optimizer)
    for number, option in enumerate(np.repeat(options, STEPS)):
        x, y = batch(number, optimizer.global_rank)
        net(x, y, lambda loss, option=str(option): optimizer.step_by(option, loss, spars=0.1))
    optimizer.synchronize()
    assert rule.step_counter.item() == STEPS * len(options)
    return parameters(net)


def looped(communicator, rule) -> np.ndarray:
    """By SINGA's loop over raw gradients."""
    optimizer = opt.DistOpt(rule, communicator=communicator)
    net = build(optimizer)
    for number in range(STEPS):
        net(*batch(number, optimizer.global_rank), partial(by_hand, optimizer))
    return parameters(net)


def every_rule(optimizer, makes) -> dict[str, np.ndarray]:
    results = {}
    for make in makes:
        for options in [*((option,) for option in OPTIONS), OPTIONS]:
            if make is ByApply and options is OPTIONS:
                continue  # its private state cannot be averaged after partial updates
            results[f"{make.__name__} {options}"] = trained(optimizer.communicator, make(schedule()), options)
        results[f"{make.__name__} by hand"] = looped(optimizer.communicator, make(schedule()))
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_users_rules_give_the_bits_of_the_built_in_one_on_all_ranks(tmp_path, world_size):
    ranks = on_ranks(tmp_path, world_size, every_rule, (ByApply, WithStates, ByHook, built_in))
    for key, own in ranks[0].items():
        assert_equal_bits(ranks, key)
        how = key.split(" ", 1)[1]
        np.testing.assert_array_equal(own, ranks[0][f"built_in {how}"], err_msg=key)
        assert np.isfinite(own).all()
