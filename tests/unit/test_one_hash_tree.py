"""The tree's codec gives the bits of a slow tree in NumPy, however the shards are dealt to ranks."""

import numpy as np
import pytest

from distopt.codecs import Part, PendingReduction, Tree, finish_all
from distopt.errors import UsageError
from distopt.shards import TreeNode, block_of
from tests.conformance.thread_ranks import on_ranks
from tests.unit.refusals import refused

PARTS = (Part("matrix", 0, (5, 7)), Part("vector", 64, (3,)))  # with a gap
SIZE = 67


def slow_tree(leaves):
    """The sum by the tree: on the left, the largest power of two of leaves that leaves some."""
    if len(leaves) == 1:
        return leaves[0]
    left = 1 << (len(leaves) - 1).bit_length() - 1
    return slow_tree(leaves[:left]) + slow_tree(leaves[left:])


def leaf(step: int, shard: int) -> np.ndarray:
    """Values of many magnitudes, so that another order gives other bits; zeros in the gap."""
    rng = np.random.default_rng([step, shard])
    values = (rng.standard_normal(SIZE) * np.exp(4 * rng.standard_normal(SIZE))).astype(np.float32)
    values[35:64] = 0
    return values


def mean_of(step: int, shards: int) -> np.ndarray:
    return slow_tree([leaf(step, shard) for shard in range(shards)]) * np.float32(1 / shards)


def attached(comm, shards: int) -> tuple:
    codec, bucket = Tree(shards), comm.empty(SIZE)
    return codec, bucket, codec.attach(bucket, comm, parts=PARTS)


def step_of(state, codec, leaves) -> object:
    """One step with the leaves of this rank's shards; the verdict."""
    rank, size = state.topology.rank, state.topology.world_size
    *first, last = block_of(codec.shards, rank, size)
    for shard in first:
        whole = leaves(shard)
        codec.fold(state, shard, [whole[p.offset : p.offset + p.size].reshape(p.shape) for p in PARTS])
    state.bucket[...] = leaves(last)
    (verdict,) = finish_all([PendingReduction(codec, state)])
    return verdict


def steps(comm, shards: int) -> list[np.ndarray]:
    (codec, bucket, state), found = attached(comm, shards), []
    for step in range(3):
        assert step_of(state, codec, lambda shard, step=step: leaf(step, shard)) is None
        found.append(bucket.copy())
    return found


@pytest.mark.parametrize(
    ("shards", "world_size"), [(1, 1), (8, 1), (8, 2), (8, 3), (8, 4), (8, 8), (7, 3), (6, 4), (13, 5), (3, 2), (5, 5)]
)
def test_bits_are_those_of_the_slow_tree(shards, world_size):
    expected = [mean_of(step, shards).tobytes() for step in range(3)]
    for found in on_ranks(world_size, lambda comm: steps(comm, shards)):
        assert [mean.tobytes() for mean in found] == expected


def test_the_tree_has_an_order_blocks_and_nodes():
    # So the tests above can fail.
    in_order = sum(leaf(0, shard) for shard in range(8)) * np.float32(1 / 8)
    assert in_order.tobytes() != mean_of(0, 8).tobytes()
    assert [list(block_of(8, rank, 3)) for rank in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert TreeNode(0, 8).within(range(2, 5)) == [TreeNode(2, 4), TreeNode(4, 5)]
    assert TreeNode(0, 8).within(range(8)) == [TreeNode(0, 8)]
    refused(UsageError, "3 shards leave nothing to some of 4 ranks", block_of, 3, 0, 4)


def test_fewer_elements_than_ranks_missing_gradients_and_an_abandoned_step_that_leaves_nothing():
    def body(comm):
        codec, bucket = Tree(4), comm.empty(2)
        state = codec.attach(bucket, comm)
        bucket[...] = [1 + comm.topology.rank, 10.0]
        finish_all([PendingReduction(codec, state)])
        return bucket.tolist()

    assert on_ranks(4, body) == [[2.5, 10.0]] * 4

    def abandoned(comm):
        codec, bucket, state = attached(comm, 4)
        for shard in (0, 1):  # of a step that an exception ends
            codec.fold(state, shard, [np.ones(part.shape, np.float32) for part in PARTS])
        for shard in (0, 1, 2):
            codec.fold(state, shard, [None, np.full(3, shard, np.float32)])
        bucket.fill(0)
        finish_all([PendingReduction(codec, state)])
        return bucket.sum(), bucket[64:].tolist()

    assert on_ranks(1, abandoned) == [(2.25, [0.75] * 3)]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_bad_gradient_is_named_and_gone_after_the_step(world_size, value):
    bad = 5  # its shard

    def leaves(shard):
        return np.where((np.arange(SIZE) == 65) & (shard == bad), np.float32(value), leaf(0, shard))

    def body(comm):
        codec, bucket, state = attached(comm, 8)
        verdict = step_of(state, codec, leaves)
        assert step_of(state, codec, lambda shard: leaf(1, shard)) is None
        return verdict.rank, verdict.element, bucket.tobytes()

    rank = next(rank for rank in range(world_size) if bad in block_of(8, rank, world_size))
    assert on_ranks(world_size, body) == [(rank, 65, mean_of(1, 8).tobytes())] * world_size


@pytest.mark.parametrize("first", [2, 3], ids=["of siblings", "between halves"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_whether_a_sum_overflows_does_not_depend_on_ranks(world_size, first):
    large = np.float32(3e38)

    def body(comm):
        codec, _, state = attached(comm, 8)
        verdicts = []
        for second in (large, -large):
            found = [leaf(0, shard) for shard in range(8)]
            for shard, values in enumerate(found):
                values[1] = {first: large, first + 1: second}.get(shard, 0)
            verdicts.append(step_of(state, codec, found.__getitem__))
        return verdicts[0].element, verdicts[1]

    assert on_ranks(world_size, body) == [(1, None)] * world_size
