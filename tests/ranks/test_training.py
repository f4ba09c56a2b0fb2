"""Accumulation, clipping and frozen parameters with real ranks: those of one process, and equal bits on all ranks."""

from itertools import product

import numpy as np
import pytest

from distopt import opt, tensor
from distopt.codecs import ErrorFeedback, Fp16, Fp32, TopK
from tests.ranks import small_net
from tests.ranks.small_net import Net, assert_equal_bits, batch, beside, build, on_ranks, parameters, step_of, whole

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
    """Ranks with different numbers of updates, of two losses each, clipped."""
    dist = new(optimizer, clip_grad_norm=SMALL_NORM)
    net = build(dist)
    with dist.join():
        for number in range(2 + dist.global_rank):
            with dist.no_sync():
                net(*batch(2 * number, dist.global_rank), dist)
            net(*batch(2 * number + 1, dist.global_rank), dist)
    assert dist.stats().steps == 1 + dist.world_size
    return {"parameters": parameters(net)}


def bad_gradients(optimizer) -> dict[str, np.ndarray]:
    """Verdicts come before the norm, and take sums of `no_sync` with them."""
    dist = new(optimizer, clip_grad_norm=SMALL_NORM, non_finite="skip")
    net = build(dist)
    net(*batch(0, dist.global_rank), dist)
    before, norm = parameters(net), dist.grad_norm
    x, y = batch(1, dist.global_rank)
    x.array[0] = np.nan if dist.global_rank == dist.world_size - 1 else x.array[0]
    for skipped in (1, 2):
        if skipped == 2:
            with dist.no_sync():
                net(x, y, dist)
            x, y = batch(2, dist.global_rank)
        net(x, y, dist)
        np.testing.assert_array_equal(parameters(net), before)
        assert (dist.grad_norm, dist.stats().skipped) == (norm, skipped)
    net(*batch(3, dist.global_rank), dist)
    assert dist.stats().skipped == 2
    assert np.isfinite(parameters(net)).all()
    return {"parameters": parameters(net)}


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
    return {body.__name__: body(optimizer)["parameters"] for body in (uneven_sums, joined, attached_while_frozen)}


@pytest.mark.slow
def test_ranks_that_differ_in_losses_updates_and_seeds_have_equal_parameters():
    assert_equal_bits(on_ranks(3, own_ways))


def other_model(optimizer) -> None:
    net = Net(hidden=31 + (optimizer.global_rank == 1))
    net.set_optimizer(optimizer)
    net.compile([batch(0, 0)[0]], is_train=True)


@pytest.mark.slow
def test_another_model_on_one_rank_is_named():
    with pytest.raises(AssertionError, match=r"rank 1 .* trains another model .*linear1.W of shape \[21, 31\]"):
        on_ranks(3, other_model)


# -- ranks with different numbers of batches: no hang, equal parameters, and the mean over the ranks that have data ---
EPOCHS = 2


def joined_epochs(optimizer, batches: tuple[int, ...]) -> dict[str, np.ndarray]:
    rank, net = optimizer.global_rank, build(optimizer)
    for _ in range(EPOCHS):
        with optimizer.join():
            for step in range(batches[rank]):
                net(*batch(step, rank), optimizer)
        total = np.array([float(batches[rank])])
        optimizer.communicator.all_reduce(total).wait()  # the ranks are in step again
        assert total[0] == sum(batches)
    assert optimizer.stats().steps == EPOCHS * max(batches)
    return {"parameters": parameters(net)}


def epochs_in_one_process(batches: tuple[int, ...]) -> np.ndarray:
    """The same, by batches of all ranks that have data: the mean over samples is the mean over these ranks."""
    single = small_net.sgd()
    net = build(single)
    for _ in range(EPOCHS):
        for step in range(max(batches)):
            net(*whole([(step, rank) for rank, count in enumerate(batches) if step < count]), single)
    return parameters(net)


def test_mean_over_ranks_with_data():
    batches = (1, 4, 2)
    ranks = on_ranks(len(batches), joined_epochs, batches)
    assert_equal_bits(ranks)
    np.testing.assert_allclose(ranks[0]["parameters"], epochs_in_one_process(batches), rtol=0, atol=1e-6)


def misuse(optimizer, how: str) -> None:
    rank, net = optimizer.global_rank, build(optimizer)
    strategies = {"error feedback": ErrorFeedback(TopK(0.1)), "partial": "partialUpdate"}
    strategy = Fp16() if how == "codec" and rank == 1 else strategies.get(how, Fp32())
    with optimizer.join():
        if how == "nested":
            with optimizer.join():
                pass
        if how == "raise" and rank == 1:
            raise ValueError("the cause")
        for step in range(0 if how == "no batch" and rank == 1 else 2):
            net(*batch(step, rank), step_of(optimizer, strategy))


@pytest.mark.slow(rest=3)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nested", "inside of DistOpt.join"),
        ("no batch", r"rank 1 \(.*\) has no batch at all"),
        ("error feedback", "use a codec without it"),
        ("partial", "partial updates need all ranks"),
        ("codec", r"rank 1 \(.*\) reduces with another codec"),
        ("raise", "the cause"),
    ],
)
def test_what_cannot_be_done_is_said(how, message):
    with pytest.raises(AssertionError, match=message):
        on_ranks(2, misuse, how)


def changed_while_one_waits(optimizer) -> None:
    optimizer = beside(optimizer, opt.SGD(lr=opt.CosineDecay(0.1, 9)), check_every=1)
    rank, net = optimizer.global_rank, build(optimizer)
    with optimizer.join():
        for step in range(2 if rank == 1 else 5):
            if step == 3:
                optimizer.lr = 0.01
            net(*batch(step, rank), optimizer)


@pytest.mark.slow
def test_a_learning_rate_that_a_rank_without_data_cannot_follow_is_named():
    with pytest.raises(AssertionError, match=r"MismatchError.*rank 1 \(") as caught:
        on_ranks(3, changed_while_one_waits)
    assert "now lr = 0.01; " in str(caught.value)
    assert "now lr = 0.075" in str(caught.value), "that of the schedule"


def end_early(optimizer) -> None:
    net = build(optimizer)
    for step in range(3 if optimizer.global_rank == 1 else 5):
        net(*batch(step, optimizer.global_rank), optimizer)
    optimizer.communicator.close()


def test_without_join_the_rank_that_ended_is_named():
    with pytest.raises(AssertionError, match=r"(?s)rank 0:.*rank 1 \(host .* (ended|closed its communicator)"):
        on_ranks(2, end_early)
