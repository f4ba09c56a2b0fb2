"""The sparse sum over any communicator."""

from itertools import product

import numpy as np
import pytest

from distopt.comm.sparse import choose_route, dense_wire_bytes, sparse_all_reduce
from distopt.errors import UsageError
from tests.conformance.checks import finish
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
def test_the_sum_runs_in_rank_order(world_size, cls, size, counts):
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
            assert finish(sparse_all_reduce(comm, indices, values, dense, lengths, scale=0.3)) >= 0
            results.append(dense.copy())
        return results

    for results in on_ranks(world_size, body, cls=cls):
        for result in results:
            assert np.array_equal(result.view(np.uint32), expected.view(np.uint32))


def test_the_route_is_the_one_of_fewest_bytes():
    # Density times world size against 1, where all that is possible is a gather.
    assert choose_route([499, 500], 1000, splits=False) == "gather"
    assert choose_route([500, 500], 1000, splits=False) == "dense"
    assert choose_route([0, 1000], 1000, splits=False) == "dense"
    assert choose_route([1000], 1000, splits=False) == "dense"
    # 5 % on 32 ranks: 6.4 KB of lists per rank, or 0.4 KB of them and 4 KB of reduced ranges; dense is 8 KB.
    assert choose_route([50] * 32, 1000, splits=False) == "dense"
    assert choose_route([50] * 32, 1000, splits=True) == "split"
    assert choose_route([10] * 4, 1000, splits=True) == "gather"
    assert choose_route([500] * 32, 1000, splits=True) == "dense"
    assert choose_route([0, 0], 0, splits=True) == "dense"
    assert dense_wire_bytes(1200, 3) == 1600
    assert dense_wire_bytes(1200, 1) == 0


def test_lists_that_do_not_fit_are_refused():
    indices, values, dense = np.arange(3, dtype=np.int32), np.ones(3, F32), np.zeros(9, F32)

    def body(comm):
        for arguments, error, fact in [
            ((indices.astype(np.int64), values, dense), TypeError, "incompatible"),
            ((indices, values.astype(float), dense), TypeError, "incompatible"),
            ((indices, values, dense.astype(float)), TypeError, "incompatible"),
            ((indices[::-1].copy(), values, dense), ValueError, "ascend"),
            ((indices, values.astype(">f4"), dense), UsageError, "big-endian"),
        ]:
            with pytest.raises(error, match=fact):
                finish(sparse_all_reduce(comm, *arguments, [3]))
        with pytest.raises(UsageError, match="parts"):
            comm.all_to_all_ragged([])

    on_ranks(1, body)
