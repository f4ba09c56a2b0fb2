"""Ranks with different numbers of batches: no hang, equal parameters, and the mean over the ranks that have data."""

import functools
from pathlib import Path

import numpy as np
import pytest

from distopt import device, launch, opt, singa_wrap, tensor
from distopt.compress import BFloat16, ErrorFeedback, Fp16, Fp32, TopK
from distopt.errors import RankFailedError

from .test_dist_opt import Net, batch

pytestmark = pytest.mark.slow(kept=1)  # seconds a case

SIZE = 8


def inputs(rank: int, step: int):
    x, y = batch(100 * rank + step, SIZE)
    return tensor.from_numpy(x), tensor.from_numpy(y)


def new_net(optimizer) -> Net:
    device.get_default_device().SetRandSeed(0)
    net = Net()
    net.set_optimizer(optimizer)
    net.compile([inputs(0, 0)[0]], is_train=True)
    net.train()
    return net


def flat(net: Net) -> np.ndarray:
    params = net.get_params()
    return np.concatenate([params[name].array.reshape(-1) for name in sorted(params)])


def reduce_with(codec, optimizer, loss) -> None:
    optimizer.reduce_and_update(loss, codec, bucket_elements=500)


def train(rank: int, world_size: int, ticket, folder: str, batches: tuple[int, ...], codec) -> None:
    optimizer = opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), ticket, rank, world_size)
    net = new_net(optimizer)
    for _ in range(2):  # two epochs
        with optimizer.join():
            for step in range(batches[rank]):
                net(*inputs(rank, step), functools.partial(reduce_with, codec))
        total = np.array([float(batches[rank])])
        optimizer.communicator.all_reduce(total).wait()  # the ranks are in step again
        assert total[0] == sum(batches)
    assert optimizer.stats().steps == 2 * max(batches)
    np.save(Path(folder) / f"{rank}.npy", flat(net))


def in_one_process(batches: tuple[int, ...]) -> np.ndarray:
    """The same, by batches of all ranks that have data: the mean over samples is the mean over these ranks."""
    net = new_net(opt.SGD(lr=0.1, momentum=0.9))
    for _ in range(2):
        for step in range(max(batches)):
            parts = [batch(100 * rank + step, SIZE) for rank, count in enumerate(batches) if step < count]
            x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            net(tensor.from_numpy(x), tensor.from_numpy(y), lambda optimizer, loss: optimizer(loss))
    return flat(net)


@pytest.mark.parametrize("batches", [(3, 5), (1, 4, 2)], ids=str)
@pytest.mark.parametrize(("codec", "tolerance"), [(Fp32(), 1e-6), (Fp16("dynamic"), 2e-3), (BFloat16(), 2e-2)])
def test_mean_over_ranks_with_data(tmp_path, batches, codec, tolerance):
    launch.spawn(train, len(batches), (singa_wrap.NcclIdHolder(), str(tmp_path), batches, codec))
    results = [np.load(tmp_path / f"{rank}.npy") for rank in range(len(batches))]
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.int32), other.view(np.int32))
    np.testing.assert_allclose(results[0], in_one_process(batches), rtol=0, atol=tolerance)


def misuse(rank: int, world_size: int, ticket, how: str) -> None:
    optimizer = opt.DistOpt(opt.SGD(lr=0.1), ticket, rank, world_size)
    net = new_net(optimizer)
    with optimizer.join():
        if how == "nested":
            with optimizer.join():
                pass
        for step in range(0 if how == "no batch" and rank == 1 else 2):
            if how == "error feedback":
                net(*inputs(rank, step), functools.partial(reduce_with, ErrorFeedback(TopK(0.1))))
            elif how == "partial":
                net(*inputs(rank, step), lambda optimizer, loss: optimizer.backward_and_partial_update(loss))
            elif how == "codec":
                net(*inputs(rank, step), functools.partial(reduce_with, Fp16() if rank == 1 else Fp32()))
            elif how == "raise" and rank == 1:
                raise ValueError("the cause")
            else:
                net(*inputs(rank, step), functools.partial(reduce_with, Fp32()))


@pytest.mark.slow
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


def end_early(rank: int, world_size: int, ticket) -> None:
    optimizer = opt.DistOpt(opt.SGD(lr=0.1), ticket, rank, world_size)
    net = new_net(optimizer)
    for step in range(3 if rank == 1 else 5):
        net(*inputs(rank, step), lambda optimizer, loss: optimizer(loss))


def changed_while_one_waits(rank: int, world_size: int, ticket) -> None:
    optimizer = opt.DistOpt(opt.SGD(lr=opt.CosineDecay(0.1, 9)), ticket, rank, world_size, check_every=1)
    net = new_net(optimizer)
    with optimizer.join():
        for step in range(2 if rank == 1 else 5):
            if step == 3:
                optimizer.lr = 0.01
            net(*inputs(rank, step), functools.partial(reduce_with, Fp32()))


@pytest.mark.slow
def test_a_learning_rate_that_a_rank_without_data_cannot_follow_is_named():
    with pytest.raises(RankFailedError) as caught:
        launch.spawn(changed_while_one_waits, 3, (singa_wrap.NcclIdHolder(),))
    assert "MismatchError" in str(caught.value)
    assert "rank 1 (" in str(caught.value)
    assert "now lr = 0.01; " in str(caught.value)
    assert "now lr = 0.075" in str(caught.value), "that of the schedule"


def test_without_join_the_rank_that_ended_is_named():
    with pytest.raises(RankFailedError, match=r"(?s)rank 0 .*rank 1 \(host .* (ended|closed its communicator)"):
        launch.spawn(end_early, 2, (singa_wrap.NcclIdHolder(),))
