"""Accumulation, clipping and frozen parameters with real ranks: those of one process, and equal bits on all ranks."""

from itertools import product

import numpy as np
import pytest

from distopt import launch, opt, singa_wrap, tensor
from distopt.errors import RankFailedError
from tests.ranks.small_net import (
    SMALL,
    STRATEGIES,
    Net,
    assert_equal_bits,
    batch,
    build,
    make,
    on_ranks,
    parameters,
    step_of,
    whole,
)

PARTS, UPDATES = 3, 4
WORLDS = pytest.mark.parametrize("world_size", [1, 3])
SMALL_NORM = 0.4  # is exceeded in every step


def rule(**options) -> opt.SGD:
    return opt.SGD(lr=0.05, momentum=0.5, weight_decay=0.01, **options)


def new(communicator, **options) -> opt.DistOpt:
    return opt.DistOpt(rule(), communicator=communicator, bucket_elements=SMALL, partition_elements=100, **options)


# -- accumulation -----------------------------------------------------------------------------------------------------
def accumulated(optimizer) -> dict[str, np.ndarray]:
    results = {}
    for name, strategy in STRATEGIES.items():
        dist = new(optimizer.communicator)
        net, step = build(dist), step_of(dist, strategy)
        for number in range(PARTS * UPDATES):
            x, y = batch(number, dist.global_rank)
            if number % PARTS == PARTS - 1:
                net(x, y, lambda loss, step=step: step(loss * (1 / PARTS)))
                continue
            before, sent = parameters(net), dist.stats().total
            with dist.no_sync():
                net(x, y, lambda loss, step=step: step(loss * (1 / PARTS)))
            np.testing.assert_array_equal(parameters(net), before)
            assert dist.stats().total == sent
        assert (dist.stats().steps, dist.step_counter.item()) == (UPDATES, UPDATES)
        dist.synchronize()
        results[name] = parameters(net)
    results["one process"] = in_one_process(optimizer.world_size)
    return results


def in_one_process(world_size: int, **options) -> np.ndarray:
    """Trained on large batches."""
    single = rule(**options)
    net = build(single)
    for number in range(UPDATES):
        net(*whole(product(range(number * PARTS, (number + 1) * PARTS), range(world_size))), single)
        assert (single.grad_norm or 1) > SMALL_NORM
    return parameters(net)


@pytest.mark.slow(kept=1)
@WORLDS
def test_sums_of_several_batches_are_sent_once_by_every_codec(tmp_path, world_size):
    ranks = on_ranks(tmp_path, world_size, accumulated)
    for name in STRATEGIES:
        assert_equal_bits(ranks, name)
    for name, bound in {"fp32": 1e-6, "top-K 100 %": 1e-6, "threshold 0": 1e-6, "fp16": 1e-3, "bf16": 1e-2}.items():
        np.testing.assert_allclose(ranks[0][name], ranks[0]["one process"], atol=bound, err_msg=name)


def uneven_sums(optimizer) -> dict[str, np.ndarray]:
    """Every rank adds another number of losses, and the first update comes after the first sum."""
    dist = new(optimizer.communicator)
    net = build(dist)
    count = dist.global_rank + 1
    with dist.no_sync():
        for number in range(count - 1):
            net(*batch(number, dist.global_rank), lambda loss: dist(loss * (1 / count)))
    net(*batch(count - 1, dist.global_rank), lambda loss: dist(loss * (1 / count)))
    return {"parameters": parameters(net)}


def joined(optimizer) -> dict[str, np.ndarray]:
    """Ranks with different numbers of updates, of two losses each, clipped."""
    dist = new(optimizer.communicator, clip_grad_norm=SMALL_NORM)
    net = build(dist)
    with dist.join():
        for number in range(2 + dist.global_rank):
            with dist.no_sync():
                net(*batch(2 * number, dist.global_rank), dist)
            net(*batch(2 * number + 1, dist.global_rank), dist)
    assert dist.stats().steps == 1 + dist.world_size
    return {"parameters": parameters(net)}


# -- clipping by norm -------------------------------------------------------------------------------------------------
def clipped(optimizer) -> dict[str, np.ndarray]:
    results = {"one process": in_one_process(optimizer.world_size, clip_grad_norm=SMALL_NORM)}
    for name, strategy in STRATEGIES.items():
        dist = new(optimizer.communicator, clip_grad_norm=SMALL_NORM)
        net, step = build(dist), step_of(dist, strategy)
        norms = []
        for number in range(UPDATES):
            before = {param.name: param.to_numpy() for param in net.get_params().values()}
            with dist.no_sync():
                for part in range(PARTS - 1):
                    xy = batch(number * PARTS + part, dist.global_rank)
                    net(*xy, lambda loss, step=step: step(loss * (1 / PARTS)))
            xy = batch(number * PARTS + PARTS - 1, dist.global_rank)
            net(*xy, lambda loss, step=step: step(loss * (1 / PARTS)))
            norms.append(dist.grad_norm)
            applied = np.concatenate([param.grad.array.reshape(-1) for param in net.get_params().values()])
            if strategy != "partialUpdate":  # whose average has taken the gradients' place
                assert np.linalg.norm(applied) == pytest.approx(min(norms[-1], SMALL_NORM), rel=1e-5)
            assert any(np.any(before[param.name] != param.array) for param in net.get_params().values())
        dist.synchronize()
        results[name], results[f"{name} norms"] = parameters(net), np.array(norms)
    return results


@pytest.mark.slow
@WORLDS
def test_the_mean_is_clipped_alike_on_all_ranks(tmp_path, world_size):
    ranks = on_ranks(tmp_path, world_size, clipped)
    for name in STRATEGIES:
        assert_equal_bits(ranks, name)
        if name == "partial" and world_size > 1:
            assert np.ptp([rank["partial norms"] for rank in ranks], axis=0).all(), "each rank's own"
        else:
            assert_equal_bits(ranks, f"{name} norms")
    assert (ranks[0]["fp32 norms"] > SMALL_NORM).all()
    np.testing.assert_allclose(ranks[0]["fp32"], ranks[0]["one process"], atol=1e-6)


def bad_gradients(optimizer) -> dict[str, np.ndarray]:
    """Verdicts come before the norm, and take sums of `no_sync` with them."""
    dist = new(optimizer.communicator, clip_grad_norm=SMALL_NORM, non_finite="skip")
    net = build(dist)
    net(*batch(0, dist.global_rank), dist)
    before, norm = parameters(net), dist.grad_norm
    x, y = batch(1, dist.global_rank)
    x.array[0] = np.nan if dist.global_rank == dist.world_size - 1 else x.array[0]
    net(x, y, dist)
    np.testing.assert_array_equal(parameters(net), before)
    assert (dist.grad_norm, dist.stats().skipped) == (norm, 1)
    with dist.no_sync():
        net(x, y, dist)
    net(*batch(2, dist.global_rank), dist)
    np.testing.assert_array_equal(parameters(net), before)
    assert (dist.grad_norm, dist.stats().skipped) == (norm, 2)
    net(*batch(3, dist.global_rank), dist)
    assert dist.stats().skipped == 2
    assert np.isfinite(parameters(net)).all()
    return {"parameters": parameters(net)}


def test_a_bad_gradient_is_skipped_before_it_is_clipped(tmp_path):
    assert_equal_bits(on_ranks(tmp_path, 2, bad_gradients), "parameters")


# -- frozen parameters ------------------------------------------------------------------------------------------------
def frozen(optimizer) -> dict[str, np.ndarray]:
    results = {}
    for name, strategy in STRATEGIES.items():
        dist = new(optimizer.communicator)
        net = build(dist)
        step = step_of(dist, strategy)
        sent = []
        for number in range(9):
            if number % 3 == 0:
                net.linear1.requires_grad = number != 3
                dist.synchronize()
                before, costs = parameters(net.linear1), dist.stats()
            net(*batch(number, dist.global_rank), step)
            assert np.array_equal(parameters(net.linear1), before) == (3 <= number < 6)
            if number % 3 == 2:
                sent.append((dist.stats() - costs).total.dense_bytes)
        assert sent[1] < 0.5 * sent[0] == 0.5 * sent[2] or dist.world_size == 1
        dist.synchronize()
        results[name] = parameters(net)
    return results


def in_one_process_frozen(world_size: int) -> np.ndarray:
    single = rule()
    net = build(single)
    for number in range(9):
        net.linear1.requires_grad = not 3 <= number < 6
        net(*whole(product([number], range(world_size))), single)
    return parameters(net)


@pytest.mark.slow(kept=1)
@WORLDS
def test_frozen_parameters_are_neither_sent_nor_changed(tmp_path, world_size):
    ranks = on_ranks(tmp_path, world_size, frozen)
    for name in STRATEGIES:
        assert_equal_bits(ranks, name)
    np.testing.assert_allclose(ranks[0]["fp32"], in_one_process_frozen(world_size), atol=1e-6)


def attached_while_frozen(optimizer) -> dict[str, np.ndarray]:
    """Frozen parameters come from rank 0, too."""
    dist = new(optimizer.communicator)
    tensor.Tensor((1,)).device.SetRandSeed(dist.global_rank)
    net = Net()
    net.compile([batch(0, 0)[0]], is_train=True)
    net.linear1.requires_grad = False
    net.set_optimizer(dist)
    net(*batch(0, dist.global_rank), dist)
    return {"parameters": parameters(net)}


def own_ways(optimizer) -> dict[str, np.ndarray]:
    return {body.__name__: body(optimizer)["parameters"] for body in (uneven_sums, joined, attached_while_frozen)}


@pytest.mark.slow
def test_ranks_that_differ_in_losses_updates_and_seeds_have_equal_parameters(tmp_path):
    ranks = on_ranks(tmp_path, 3, own_ways)
    for name in ranks[0]:
        assert_equal_bits(ranks, name)


def other_model(rank: int, world_size: int, ticket) -> None:
    net = Net(hidden=31 + (rank == 1))
    net.set_optimizer(make(rank, world_size, ticket))
    net.compile([batch(0, 0)[0]], is_train=True)


@pytest.mark.slow
def test_another_model_on_one_rank_is_named():
    with pytest.raises(RankFailedError, match=r"rank 1 .* trains another model .*linear1.W of shape \[21, 31\]"):
        launch.spawn(other_model, 3, (singa_wrap.NcclIdHolder(),))
