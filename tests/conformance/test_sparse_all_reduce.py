"""The sparse sum that every communicator offers."""

from itertools import product

import numpy as np
import pytest

from distopt.comm.sparse import choose_strategy, dense_wire_bytes
from distopt.errors import UsageError
from tests.conformance.thread_ranks import OracleCommunicator, SplittingCommunicator, on_ranks

F32 = np.float32
WORLDS = list(product([1, 2, 3, 4, 5], [OracleCommunicator, SplittingCommunicator]))
worlds = pytest.mark.parametrize(("world_size", "cls"), WORLDS)

COUNTS = {
    "equal": lambda rank, size: size // 50,
    "ragged": lambda rank, size: size // 50 * rank,
    "many": lambda rank, size: size // 3 + rank,
    "all": lambda rank, size: size,
    "none": lambda rank, size: 0,
}


def sparse_list(rank, size, count):
    rng = np.random.default_rng(rank)
    indices = np.sort(rng.choice(size, count, replace=False)).astype(np.int32)
    values = rng.standard_normal(count).astype(F32) * F32(10**rank)
    values[::7] = -0.0
    return indices, values


@worlds
@pytest.mark.parametrize("size", [1, 3, 1009])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("known", [False, True])
def test_the_sum_runs_in_rank_order(world_size, cls, size, counts, known):
    lengths = [COUNTS[counts](rank, size) for rank in range(world_size)]
    lengths = [min(length, size) for length in lengths]
    lists = [sparse_list(rank, size, length) for rank, length in enumerate(lengths)]
    expected = np.zeros(size, F32)
    for indices, values in lists:
        expected[indices] += values * F32(0.3)

    def body(comm):
        dense = comm.empty(size)
        results = []
        for _ in range(2):
            indices, values = lists[comm.topology.rank]
            work = comm.sparse_all_reduce(indices, values, dense, counts=lengths if known else None, scale=0.3)
            work.done()
            work.wait()
            work.wait()
            assert work.done()
            assert work.wire_bytes >= 0
            results.append(dense.copy())
        return results

    for results in on_ranks(world_size, body, cls=cls):
        for result in results:
            assert np.array_equal(result.view(np.uint32), expected.view(np.uint32))


@worlds
def test_parts_reach_the_rank_they_are_for(world_size, cls):
    def part(source, target):
        return np.arange(source * target, dtype=np.int32) + 100 * source

    def body(comm):
        rank = comm.topology.rank
        return [comm.all_to_all_ragged([part(rank, target) for target in range(world_size)]) for _ in range(2)]

    for rank, results in enumerate(on_ranks(world_size, body, cls=cls)):
        for received in results:
            assert [array.tolist() for array in received] == [part(r, rank).tolist() for r in range(world_size)]


def test_the_strategy_is_the_one_of_fewest_bytes():
    # Density times world size against 1, where all that is possible is a gather.
    assert choose_strategy([499, 500], 1000, splits=False) == "gather"
    assert choose_strategy([500, 500], 1000, splits=False) == "dense"
    assert choose_strategy([0, 1000], 1000, splits=False) == "dense"
    assert choose_strategy([1000], 1000, splits=False) == "dense"
    # 5 % on 32 ranks: 6.4 KB of lists per rank, or 0.4 KB of them and 4 KB of reduced ranges; dense is 8 KB.
    assert choose_strategy([50] * 32, 1000, splits=False) == "dense"
    assert choose_strategy([50] * 32, 1000, splits=True) == "split"
    assert choose_strategy([10] * 4, 1000, splits=True) == "gather"
    assert choose_strategy([500] * 32, 1000, splits=True) == "dense"
    assert choose_strategy([0, 0], 0, splits=True) == "dense"
    assert dense_wire_bytes(1200, 3) == 1600
    assert dense_wire_bytes(1200, 1) == 0


def test_lists_that_do_not_fit_are_refused():
    indices, values, dense = np.arange(3, dtype=np.int32), np.ones(3, F32), np.zeros(9, F32)

    def body(comm):
        for arguments in [
            (indices.astype(np.int64), values, dense),
            (indices, values.astype(float), dense),
            (indices[:2], values, dense),
            (indices, values, dense.astype(float)),
            (indices, values, dense.reshape(3, 3)),
        ]:
            with pytest.raises(UsageError):
                comm.sparse_all_reduce(*arguments)
        with pytest.raises(UsageError, match="counts"):
            comm.sparse_all_reduce(indices, values, dense, counts=[2])
        with pytest.raises(UsageError, match="parts"):
            comm.all_to_all_ragged([])
        with pytest.raises(ValueError, match="ascend"):
            comm.sparse_all_reduce(indices[::-1].copy(), values, dense).wait()

    on_ranks(1, body)
