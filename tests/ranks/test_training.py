"""Accumulation, clipping, frozen parameters and uneven data with real ranks; bad gradients and arguments are named."""

from functools import partial
from itertools import product

import numpy as np
import pytest

from distopt import device, opt, singa_wrap, tensor
from distopt.errors import UsageError
from tests.ranks import small_net
from tests.ranks.small_net import Net, assert_equal_bits, batch, beside, build, on_ranks, parameters, step_of, whole
from tests.unit.refusals import refused

PARTS, UPDATES = 3, 4
# One of each kind; tests/conformance has all codecs.
KINDS = {name: small_net.STRATEGIES[name] for name in ("fp32", "fp16", "top-K", "PowerSGD", "partial")}
WORLDS = pytest.mark.parametrize("world_size", [3, 1])
SMALL_NORM = 0.4  # is exceeded in every step


def rule(**options) -> opt.SGD:
    return opt.SGD(lr=0.05, momentum=0.5, weight_decay=0.01, **options)


def new(optimizer, **options) -> opt.DistOpt:
    return beside(optimizer, rule(), partition_elements=100, **options)


def part_of(step, count: int = PARTS):
    """A step with a share of the loss."""
    return lambda loss: step(loss * (1 / count))


# -- accumulation, and clipping by norm -------------------------------------------------------------------------------
def accumulated(optimizer, options: dict[str, float]) -> dict[str, np.ndarray]:
    results = {"one process": in_one_process(optimizer.world_size, **options)}
    for name, strategy in KINDS.items():
        dist = new(optimizer, **options)
        net, step, norms = build(dist), part_of(step_of(dist, strategy)), []
        for number in range(PARTS * UPDATES):
            xy, before, sent = batch(number, dist.global_rank), parameters(net), dist.stats().total
            if number % PARTS < PARTS - 1:
                with dist.no_sync():
                    net(*xy, step)
                np.testing.assert_array_equal(parameters(net), before)
                assert dist.stats().total == sent
                continue
            net(*xy, step)
            assert np.any(parameters(net) != before)
            norms.append(dist.grad_norm if options else 0.0)
            if options and strategy != "partialUpdate":  # whose average has taken the gradients' place
                applied = np.concatenate([param.grad.array.reshape(-1) for param in net.get_params().values()])
                assert np.linalg.norm(applied) == pytest.approx(min(norms[-1], SMALL_NORM), rel=1e-5)
        assert (dist.stats().steps, dist.step_counter.item()) == (UPDATES, UPDATES)
        dist.synchronize()
        results[name], results[f"{name} norms"] = parameters(net), np.array(norms)
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
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": SMALL_NORM}], ids=["whole", "clipped"])
def test_sums_of_several_batches_are_sent_once_and_their_mean_is_clipped_alike(world_size, options):
    ranks = on_ranks(world_size, accumulated, options)
    own = "partial norms" if options and world_size > 1 else None
    assert_equal_bits(ranks, *(key for key in ranks[0] if key != own))
    if own:
        assert np.ptp([rank[own] for rank in ranks], axis=0).all(), "each rank's own"
    assert not options or (ranks[0]["fp32 norms"] > SMALL_NORM).all()
    for name, bound in {"fp32": 1e-6, **({} if options else {"fp16": 1e-3})}.items():
        np.testing.assert_allclose(ranks[0][name], ranks[0]["one process"], atol=bound, err_msg=name)


def uneven_sums(optimizer) -> dict[str, np.ndarray]:
    """Every rank adds another number of losses, and the first update comes after the first sum."""
    dist = new(optimizer)
    net, count = build(dist), dist.global_rank + 1
    with dist.no_sync():
        for number in range(count - 1):
            net(*batch(number, dist.global_rank), part_of(dist, count))
    net(*batch(count - 1, dist.global_rank), part_of(dist, count))
    return {"parameters": parameters(net)}


def joined(optimizer) -> dict[str, np.ndarray]:
    """Ranks with different numbers of updates, of two losses each, clipped; after an epoch they are in step again."""
    dist = new(optimizer, clip_grad_norm=SMALL_NORM)
    net, count = build(dist), 2 + dist.global_rank
    for _ in range(2):
        with dist.join():
            for number in range(count):
                with dist.no_sync():
                    net(*batch(2 * number, dist.global_rank), dist)
                net(*batch(2 * number + 1, dist.global_rank), dist)
        dist.all_reduce(total := np.array([count]))
        dist.wait()
        assert total == sum(range(2, 2 + dist.world_size))
    assert dist.stats().steps == 2 * (1 + dist.world_size)
    return {"parameters": parameters(net)}


def forgetting(optimizer) -> dict[str, np.ndarray]:
    """A gradient that a script has set to None is averaged all the same."""
    results = []
    for forgets in (False, True):
        dist = new(optimizer)
        net = build(dist)
        for number in range(4):
            for param in net.get_params().values() if forgets else ():
                param.grad = None
            net(*batch(number, dist.global_rank), dist)
        results.append(parameters(net))
    np.testing.assert_array_equal(*results)
    return {"parameters": results[0]}


def ignoring(optimizer) -> dict[str, np.ndarray]:
    dist = new(optimizer, non_finite="ignore")
    net = build(dist)
    x, y = batch(0, dist.global_rank)
    x.array[0] = np.nan if dist.global_rank == dist.world_size - 1 else x.array[0]
    net(x, y, dist)
    assert np.isnan(parameters(net)).any()
    return {"parameters": parameters(net)}


def bad_gradients(optimizer) -> dict[str, np.ndarray]:
    """Verdicts come before the norm, and take sums of `no_sync` with them."""
    results = {}
    for name in ("fp32", "top-K", "partial"):
        dist = new(optimizer, clip_grad_norm=SMALL_NORM, non_finite="skip")
        net, step = build(dist), step_of(dist, KINDS[name])
        net(*batch(0, dist.global_rank), step)
        before, norm = parameters(net), dist.grad_norm
        x, y = batch(1, dist.global_rank)
        x.array[0] = np.nan if dist.global_rank == dist.world_size - 1 else x.array[0]
        for skipped in (1, 2):
            if skipped == 2:
                with dist.no_sync():
                    net(x, y, step)
                x, y = batch(2, dist.global_rank)
            net(x, y, step)
            np.testing.assert_array_equal(parameters(net), before)
            assert (dist.grad_norm, dist.stats().skipped) == (norm, skipped)
        net(*batch(3, dist.global_rank), step)
        assert dist.stats().skipped == 2
        assert (parameters(net) != before).any()
        dist.synchronize()
        results[name] = parameters(net)
        assert np.isfinite(results[name]).all()
    return results


def test_a_bad_gradient_is_skipped_before_it_is_clipped():
    assert_equal_bits(on_ranks(2, bad_gradients))


# -- frozen parameters ------------------------------------------------------------------------------------------------
def frozen(optimizer) -> dict[str, np.ndarray]:
    results = {}
    for name, strategy in KINDS.items():
        dist = new(optimizer)
        net, step, sent = build(dist), step_of(dist, strategy), []
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
def test_frozen_parameters_are_neither_sent_nor_changed(world_size):
    ranks = on_ranks(world_size, frozen)
    assert_equal_bits(ranks)
    np.testing.assert_allclose(ranks[0]["fp32"], in_one_process_frozen(world_size), atol=1e-6)


def attached_while_frozen(optimizer) -> dict[str, np.ndarray]:
    """Frozen parameters come from rank 0, too."""
    dist = new(optimizer)
    tensor.Tensor((1,)).device.SetRandSeed(dist.global_rank)
    net = Net()
    net.compile([batch(0, 0)[0]], is_train=True)
    net.linear1.requires_grad = False
    net.set_optimizer(dist)
    net(*batch(0, dist.global_rank), dist)
    return {"parameters": parameters(net)}


def own_ways(optimizer) -> dict[str, np.ndarray]:
    bodies = (uneven_sums, joined, attached_while_frozen, forgetting, ignoring)
    return {body.__name__: body(optimizer)["parameters"] for body in bodies}


def test_ranks_that_differ_in_losses_updates_seeds_and_gradients_have_equal_parameters():
    assert_equal_bits(on_ranks(3, own_ways))


# -- arguments and types ----------------------------------------------------------------------------------------------
@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setenv("DISTOPT_TRANSPORT", "single")
    return lambda **options: opt.DistOpt(opt.SGD(lr=0.05), singa_wrap.NcclIdHolder(), 0, 1, **options)


def test_bad_arguments_are_named(alone):
    optimizer = alone()
    net = build(optimizer)
    x, y = batch(0, 0)
    sparse, half = optimizer.backward_and_sparse_update, optimizer.backward_and_update_half
    for match, step, options in (
        (r"ratio of top-K is 0.0; .* in \(0, 1\]", sparse, {"spars": 0.0, "topK": True}),
        (r"ratio of top-K is 1.5; .* in \(0, 1\]", partial(optimizer.step_by, "sparseTopK"), {"spars": 1.5}),
        ("threshold is -0.1;", sparse, {"spars": -0.1}),
        ("unknown dist_option 'fp8'; choose one of plain, fp32,", partial(optimizer.step_by, "fp8"), {}),
        (r"\(clip\) is -1;", half, {"clipping": True, "clip_Value": -1}),
        ("elements is -5; it must be an integer of at least 0", optimizer.backward_and_update, {"threshold": -5}),
    ):
        refused(UsageError, match, net, x, y, partial(step, **options))
    net(x, y, optimizer)
    refused(UsageError, "='stop' is not one of raise, skip, ignore", setattr, optimizer, "non_finite", "stop")
    for match, options in (
        ("non_finite='stop' is not one of raise, skip, ignore", {"non_finite": "stop"}),
        ("unknown codec 'fp8'; choose one of", {"codec": "fp8"}),
        ("fusion buffer in elements is 0; it must be an integer", {"buffSize": 0}),
        ("fusion buffer in elements is 'a'; it must be an integer", {"buffSize": "a"}),
        *((f"check_every is {x!r}; it must be an integer of at least 0", {"check_every": x}) for x in (-1, 2.5, True)),
        *((f"check_every is {x!r}; it must be an integer of at least 0", {"check_every": x}) for x in (None, "100")),
    ):
        refused(UsageError, match, alone, **options)


def test_float64_parameters_train_in_float64_and_lossy_codecs_refuse_them(alone):
    x, y = batch(0, 0)
    wide = tensor.Tensor.of(x.array.astype(np.float64))
    optimizer = alone()
    device.get_default_device().SetRandSeed(3)
    net = Net()
    net.set_optimizer(optimizer)
    net.compile([wide], is_train=True)
    assert parameters(net).dtype == np.float64
    first = net(wide, y, optimizer).item()
    for _ in range(20):
        last = net(wide, y, optimizer).item()
    assert last < first
    text = r"bucket 0: linear2.W of float64 cannot be reduced by Fp16, which takes float32"
    refused(UsageError, text, net, wide, y, optimizer.backward_and_update_half)
