"""Sums by a fixed binary tree over the shards of a step: the same bits for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..comm.base import Array
from ..errors import UsageError
from ..kernels import FROM_BAD
from ..shards import TreeNode, block_of
from .base import Codec
from .reduction import BadGradient, CodecState, Steps

_QUIET = np.errstate(over="ignore", invalid="ignore")  # of bad gradients, which the verdict names


@dataclass(frozen=True)
class Tree(Codec):
    """Dense, in the type of the bucket: the mean over all shards of a step, by the tree of `distopt.shards`.

    Each rank adds up its own shards as they come, and keeps the sums of the largest nodes that it has all shards of:
    one where the numbers of shards and ranks are powers of two, else a few. Then each rank receives its slice of
    everybody's sums, adds them up in the order of the tree, and sends the mean to all. The division comes last, once.

    Args:
        shards: number of shards of a step.
    """

    shards: int
    lossy: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64")

    def prepare(self, state: CodecState) -> None:
        """Collective. Find which nodes of the tree this rank has, and make memory for its slice of the sums."""
        if not isinstance(state.bucket, np.ndarray):
            raise UsageError("the sum over shards runs on the CPU; set DISTOPT_DEVICE=cpu, or leave shards= out")
        topology, size, memory = state.topology, state.bucket.size, state.memory
        n, root = topology.world_size, TreeNode(0, self.shards)
        blocks = [block_of(self.shards, rank, n) for rank in range(n)]
        memory["mine"] = blocks[topology.rank]
        memory["nodes"] = [root.within(block) for block in blocks]
        memory["views"] = [state.bucket[p.offset : p.offset + p.size].reshape(p.shape) for p in state.parts]
        memory["sums"], memory["merges"] = [], {}
        for node in memory["nodes"][topology.rank]:
            _count_merges(node, memory["merges"])
        # The sum of two numbers does not depend on their order, so two ranks may leave it to the communicator.
        memory["direct"] = n == 1 or (
            n == 2 and state.comm.finds_nonfinite and [len(nodes) for nodes in memory["nodes"]] == [1, 1]
        )
        if memory["direct"]:
            return
        state.prepare_header()
        memory["slice"] = each = max(1, -(-size // n))
        memory["mean"] = state.empty(each * n, state.bucket.dtype.name, xp=np)
        memory["mean"].fill(0)

    @_QUIET
    def fold(self, state: CodecState, shard: int, grads: Sequence[Array | None]) -> None:
        """Local. Add the gradients of one of this rank's shards, but for its last, to the sums. Shards come in order.

        Args:
            state: of the bucket.
            shard: its number.
            grads: an array in the shape of each part of the bucket; None for zeros. They become part of the sums, where
                later ones are added in place.
        """
        sums: list[list[Array]] = state.memory["sums"]
        if shard == state.memory["mine"].start:
            sums.clear()  # of a step before, which an exception may have ended
        given = zip(grads, state.parts, strict=True)
        sums.append([np.zeros(p.shape, state.bucket.dtype) if grad is None else grad for grad, p in given])
        for _ in range(state.memory["merges"].get(shard, 0)):
            right = sums.pop()
            for into, added in zip(sums[-1], right, strict=True):
                np.add(into, added, out=into)

    @_QUIET
    def _complete(self, state: CodecState) -> list[Array]:
        """The sums of this rank's nodes. The last one replaces the gradients of the last shard in the bucket."""
        memory, bucket = state.memory, state.bucket
        sums: list[list[Array]] = memory["sums"]
        last, views = memory["mine"].stop - 1, memory["views"]
        if last == memory["mine"].start:
            sums.clear()
        merges, count = memory["merges"].get(last, 0), len(memory["nodes"][state.topology.rank])
        if len(sums) != merges + count - 1:  # an exception has ended the step: the bucket holds NaN
            return [bucket] * count
        for _ in range(merges):
            for left, into in zip(sums.pop(), views, strict=True):
                np.add(left, into, out=into)
        whole = [np.zeros_like(bucket) for _ in sums]
        for flat, arrays in zip(whole, sums, strict=True):
            for part, array in zip(state.parts, arrays, strict=True):
                flat[part.offset : part.offset + part.size].reshape(part.shape)[...] = array
        sums.clear()
        return [*whole, bucket]

    def reduce(self, state: CodecState) -> Steps:
        """Collective. Exchange slices of the sums, add them up in the order of the tree, and gather the means.

        The bucket holds the gradients of this rank's last shard.
        """
        sums, bucket, rank = self._complete(state), state.bucket, state.topology.rank
        scale = bucket.dtype.type(1 / self.shards)
        if state.memory["direct"]:
            alone = state.topology.world_size == 1
            work = state.all_reduce(bucket, "sum", find_nonfinite=state.check_finite and not alone)
            yield work
            np.multiply(bucket, scale, out=bucket)
            if alone and state.check_finite and (index := state.kernels.first_nonfinite(bucket)) is not None:
                return _bad(state, 0, index)
            return None if work.nonfinite is None else _bad(state, *work.nonfinite)
        each, mean = state.memory["slice"], state.memory["mean"]
        nodes: list[list[TreeNode]] = state.memory["nodes"]
        cuts = [slice(to * each, (to + 1) * each) for to in range(len(nodes))]
        works = [
            state.all_to_all_ragged([(sums[i] if i < len(sums) else bucket[:0])[cut] for cut in cuts])
            for i in range(max(map(len, nodes)))
        ]
        yield from works
        arrived = {node: works[i].parts[q] for q, own in enumerate(nodes) for i, node in enumerate(own)}
        total = _sum_of(TreeNode(0, self.shards), arrived)
        mine = mean[cuts[rank]]
        np.multiply(total, scale, out=mine[: total.size])
        if state.check_finite and state.kernels.first_nonfinite(mine) is not None:
            mine[0] = np.nan  # where every rank looks
        work = state.all_gather(mine, mean)
        yield work
        work.done()
        if state.check_finite and np.isnan(mean[::each]).any():
            state.findings[FROM_BAD] = _from_bad(state, sums, self.shards)
            header = state.send_header()
            yield header
            return state.read_header(header, "NaN, infinite or too large for a sum over the shards").verdict
        bucket[...] = mean[: bucket.size]
        return None


def _count_merges(node: TreeNode, merges: dict[int, int]) -> None:
    """Add to `merges`, by shard, the number of nodes with more than one shard that end with it."""
    if node.end - node.first > 1:
        merges[node.end - 1] = merges.get(node.end - 1, 0) + 1
        for child in node.children():
            _count_merges(child, merges)


@_QUIET
def _sum_of(node: TreeNode, arrived: Mapping[TreeNode, Array]) -> Array:
    """The sum of a node from those of nodes in it, in the memory of one of them."""
    if node in arrived:
        return arrived[node]
    left, right = (_sum_of(child, arrived) for child in node.children())
    return np.add(left, right, out=left)


def _bad(state: CodecState, rank: int, index: int) -> BadGradient | None:
    return state.verdict([0] * rank + [state.bucket.size - index], "NaN, infinite or too large for a sum")


def _from_bad(state: CodecState, sums: Sequence[Array], shards: int) -> int:
    """As in findings, for the sums of this rank: an element that cannot be in a finite sum."""
    limit, found = float(np.finfo(state.bucket.dtype).max) / (2 * shards), np.zeros(1, np.int64)
    worst = 0
    for array in sums:
        state.kernels.find_beyond(array, limit, found)
        worst = max(worst, int(found[0]))
    return worst
