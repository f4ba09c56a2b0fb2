"""The tree's codec gives the bits of a slow tree in NumPy, however the shards are dealt to ranks."""

import numpy as np
import pytest

from distopt.codecs import Part, PendingReduction, Tree
from distopt.comm import create
from distopt.errors import UsageError
from distopt.shards import TreeNode, block_of
from tests.conformance.ranks import run_ranks_ok
from tests.conformance.thread_ranks import on_ranks

PARTS = (Part("matrix", 0, (5, 7)), Part("vector", 64, (3,)))  # with a gap
SIZE = 67


def slow_tree(leaves):
    """The sum by the tree: on the left, the largest power of two of leaves that leaves some."""
    if len(leaves) == 1:
        return leaves[0]
    left = 1
    while 2 * left < len(leaves):
        left *= 2
    return slow_tree(leaves[:left]) + slow_tree(leaves[left:])


def leaf(step: int, shard: int) -> np.ndarray:
    """Values of many magnitudes, so that another order gives other bits; zeros in the gap."""
    rng = np.random.default_rng([step, shard])
    values = (rng.standard_normal(SIZE) * np.exp(4 * rng.standard_normal(SIZE))).astype(np.float32)
    values[35:64] = 0
    return values


def mean_of(step: int, shards: int) -> np.ndarray:
    return slow_tree([leaf(step, shard) for shard in range(shards)]) * np.float32(1 / shards)


def step_of(state, codec, leaves) -> object:
    """One step with the leaves of this rank's shards; the verdict."""
    rank, size = state.topology.rank, state.topology.world_size
    *first, last = block_of(codec.shards, rank, size)
    for shard in first:
        whole = leaves(shard)
        codec.fold(state, shard, [whole[p.offset : p.offset + p.size].reshape(p.shape) for p in PARTS])
    state.bucket[...] = leaves(last)
    reduction = PendingReduction(codec, state)
    while not reduction.finished:
        reduction.resume()
    return reduction.verdict


def steps(comm, shards: int) -> list[np.ndarray]:
    codec, bucket, found = Tree(shards), comm.empty(SIZE), []
    state = codec.attach(bucket, comm, parts=PARTS)
    for step in range(3):
        assert step_of(state, codec, lambda shard, step=step: leaf(step, shard)) is None
        found.append(bucket.copy())
    return found


def check(ranks, shards: int) -> None:
    for found in ranks:
        for step, mean in enumerate(found):
            assert mean.tobytes() == mean_of(step, shards).tobytes(), f"step {step}"


@pytest.mark.parametrize(
    ("shards", "world_size"), [(1, 1), (8, 1), (8, 2), (8, 3), (8, 4), (8, 8), (7, 3), (6, 4), (13, 5), (3, 2), (5, 5)]
)
def test_bits_are_those_of_the_slow_tree(shards, world_size):
    check(on_ranks(world_size, lambda comm: steps(comm, shards)), shards)


def over(job, transport: str, shards: int) -> list[np.ndarray]:
    with create(job, transport) as comm:
        return steps(comm, shards)


@pytest.mark.parametrize(("shards", "world_size"), [(8, 2), (7, 2), (8, 3)])
def test_the_same_over_shared_memory(shards, world_size):
    check(run_ranks_ok(over, world_size, "shm", shards), shards)


def test_another_order_gives_other_bits():
    """So the tests above can fail."""
    in_order = sum(leaf(0, shard) for shard in range(8)) * np.float32(1 / 8)
    assert in_order.tobytes() != mean_of(0, 8).tobytes()


def test_fewer_elements_than_ranks():
    def body(comm):
        bucket = comm.empty(2)
        codec = Tree(4)
        state = codec.attach(bucket, comm)
        bucket[...] = [1 + comm.topology.rank, 10.0]
        reduction = PendingReduction(codec, state)
        while not reduction.finished:
            reduction.resume()
        return bucket.tolist()

    assert on_ranks(4, body) == [[2.5, 10.0]] * 4


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_bad_gradient_is_named_and_gone_after_the_step(world_size, value):
    bad = 5  # its shard

    def body(comm):
        codec, bucket = Tree(8), comm.empty(SIZE)
        state = codec.attach(bucket, comm, parts=PARTS)

        def leaves(shard):
            values = leaf(0, shard)
            if shard == bad:
                values[65] = value
            return values

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
        codec, bucket = Tree(8), comm.empty(SIZE)
        state = codec.attach(bucket, comm, parts=PARTS)
        ends = {first: large, first + 1: large}
        verdict = step_of(
            state,
            codec,
            lambda shard: np.where(np.arange(SIZE) == 1, ends.get(shard, 0), leaf(0, shard)).astype(np.float32),
        )
        opposite = {first: large, first + 1: -large}
        calm = step_of(
            state,
            codec,
            lambda shard: np.where(np.arange(SIZE) == 1, opposite.get(shard, 0), leaf(0, shard)).astype(np.float32),
        )
        return verdict.element, calm

    assert on_ranks(world_size, body) == [(1, None)] * world_size


def test_missing_gradients_are_zeros_and_an_abandoned_step_leaves_nothing():
    def body(comm):
        codec, bucket = Tree(4), comm.empty(SIZE)
        state = codec.attach(bucket, comm, parts=PARTS)
        for shard in (0, 1):  # of a step that an exception ends
            codec.fold(state, shard, [np.ones(part.shape, np.float32) for part in PARTS])
        for shard in (0, 1, 2):
            codec.fold(state, shard, [None, np.full(3, shard, np.float32)])
        bucket.fill(0)
        reduction = PendingReduction(codec, state)
        while not reduction.finished:
            reduction.resume()
        return bucket.sum(), bucket[64:].tolist()

    assert on_ranks(1, body) == [(2.25, [0.75] * 3)]


def test_blocks_and_nodes():
    assert [list(block_of(8, rank, 3)) for rank in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert TreeNode(0, 8).within(range(2, 5)) == [TreeNode(2, 4), TreeNode(4, 5)]
    assert TreeNode(0, 8).within(range(8)) == [TreeNode(0, 8)]
    with pytest.raises(UsageError, match="3 shards leave nothing to some of 4 ranks"):
        block_of(3, 0, 4)
