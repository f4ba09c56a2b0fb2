"""The shards of a step, whose number does not depend on that of the ranks, and the tree that sums their gradients.

The tree is binary, over shards 0 to S - 1, and its shape depends on S alone. So a sum by the tree has the same bits,
whichever rank adds up which of its nodes. Each rank has a contiguous block of shards.
"""

from __future__ import annotations

from typing import NamedTuple

from .checks import check_integer
from .errors import UsageError


class TreeNode(NamedTuple):
    """A node of the tree: it sums the shards from `first` up to, but not including, `end`."""

    first: int
    end: int

    def children(self) -> tuple[TreeNode, TreeNode]:
        """The two nodes that it adds; the left one has the largest power of two of shards that leaves some."""
        middle = self.first + (1 << (self.end - self.first - 1).bit_length() - 1)
        return TreeNode(self.first, middle), TreeNode(middle, self.end)

    def within(self, block: range) -> list[TreeNode]:
        """The largest nodes in this one that a block of shards contains, in order."""
        if block.start <= self.first and self.end <= block.stop:
            return [self]
        if block.stop <= self.first or self.end <= block.start:
            return []
        return [node for child in self.children() for node in child.within(block)]


def block_of(shards: int, rank: int, world_size: int) -> range:
    """The shards of a rank. Blocks of two ranks differ by one shard at most.

    Raises:
        UsageError: there are fewer shards than ranks.
    """
    if check_integer("shards", shards, 1) < world_size:
        raise UsageError(f"{shards} shards leave nothing to some of {world_size} ranks; use as many shards, or more")
    return range(rank * shards // world_size, (rank + 1) * shards // world_size)
