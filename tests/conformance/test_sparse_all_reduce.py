"""The sparse sum over any communicator."""

import numpy as np
import pytest

from distopt.comm.sparse import choose_route, dense_wire_bytes, sparse_all_reduce
from distopt.errors import UsageError
from tests.conformance.checks import check_sparse_all_reduce, finish
from tests.conformance.thread_ranks import OracleCommunicator, SplittingCommunicator, on_ranks, with_ranks

F32 = np.float32


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("cls", [OracleCommunicator, SplittingCommunicator])
def test_the_sum_runs_in_rank_order(world_size, cls):
    on_ranks(world_size, lambda comm: check_sparse_all_reduce(comm, world_size, comm.topology.rank), cls=cls)


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


@with_ranks(1)
def test_lists_that_do_not_fit_are_refused(comm):
    indices, values, dense = np.arange(3, dtype=np.int32), np.ones(3, F32), np.zeros(9, F32)
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
