"""Ranks with different numbers of batches: no hang, equal parameters, and the mean over the ranks that have data."""

import numpy as np
import pytest

from distopt import launch, opt, singa_wrap
from distopt.codecs import ErrorFeedback, Fp16, Fp32, TopK
from distopt.errors import RankFailedError
from tests.ranks.small_net import assert_equal_bits, batch, build, make, on_ranks, parameters, step_of, whole

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

EPOCHS = 2


def joined(optimizer, batches: tuple[int, ...]) -> dict[str, np.ndarray]:
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


def in_one_process(batches: tuple[int, ...]) -> np.ndarray:
    """The same, by batches of all ranks that have data: the mean over samples is the mean over these ranks."""
    sgd = opt.SGD(lr=0.05, momentum=0.5)
    net = build(sgd)
    for _ in range(EPOCHS):
        for step in range(max(batches)):
            net(*whole([(step, rank) for rank, count in enumerate(batches) if step < count]), sgd)
    return parameters(net)


@pytest.mark.parametrize("batches", [(3, 5), (1, 4, 2)], ids=str)
def test_mean_over_ranks_with_data(tmp_path, batches):
    ranks = on_ranks(tmp_path, len(batches), joined, batches)
    assert_equal_bits(ranks, "parameters")
    np.testing.assert_allclose(ranks[0]["parameters"], in_one_process(batches), rtol=0, atol=1e-6)


def misuse(rank: int, world_size: int, ticket, how: str) -> None:
    optimizer = make(rank, world_size, ticket)
    net = build(optimizer)
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


@pytest.mark.slow
@pytest.mark.sweep(rest=3)
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
    with pytest.raises(RankFailedError, match=message):
        launch.spawn(misuse, 2, (singa_wrap.NcclIdHolder(), how))


def changed_while_one_waits(rank: int, world_size: int, ticket) -> None:
    optimizer = opt.DistOpt(opt.SGD(lr=opt.CosineDecay(0.1, 9)), ticket, rank, world_size, check_every=1)
    net = build(optimizer)
    with optimizer.join():
        for step in range(2 if rank == 1 else 5):
            if step == 3:
                optimizer.lr = 0.01
            net(*batch(step, rank), optimizer)


@pytest.mark.slow
def test_a_learning_rate_that_a_rank_without_data_cannot_follow_is_named():
    with pytest.raises(RankFailedError) as caught:
        launch.spawn(changed_while_one_waits, 3, (singa_wrap.NcclIdHolder(),))
    assert "MismatchError" in str(caught.value)
    assert "rank 1 (" in str(caught.value)
    assert "now lr = 0.01; " in str(caught.value)
    assert "now lr = 0.075" in str(caught.value), "that of the schedule"


def end_early(rank: int, world_size: int, ticket) -> None:
    optimizer = make(rank, world_size, ticket)
    net = build(optimizer)
    for step in range(3 if rank == 1 else 5):
        net(*batch(step, rank), optimizer)


def test_without_join_the_rank_that_ended_is_named():
    with pytest.raises(RankFailedError, match=r"(?s)rank 0 .*rank 1 \(host .* (ended|closed its communicator)"):
        launch.spawn(end_early, 2, (singa_wrap.NcclIdHolder(),))
