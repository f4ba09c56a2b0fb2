"""A rank of the checks: its data, what one process computes of it, and comparisons."""

import gc
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distopt.errors import DistoptError

from ..forked import group_with_gloo

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

Tensors = torch.Tensor | Iterable[torch.Tensor]

TIMEOUT_SECONDS = 120.0
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]
MOVED = [*DTYPES, torch.float8_e4m3fn, torch.complex32]
OPS = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
    "AVG": torch.add,
}
# How a tensor of 2 x 5 x 3 elements can lie in memory.
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 1],
    "flat": lambda t: t.reshape(-1),
    "empty": lambda t: t[:0],
    "number": lambda t: t[1, 2, 0].clone(),
}


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (2, 5, 3)) -> torch.Tensor:
    """Data of a rank, small enough for products, depending on rank and index."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * (rank + 2) + rank) % 5 + 1
    if dtype == torch.bool:
        return ((numbers % 3) > 0).view(shape)
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers % 3).double()).to(dtype).view(shape)
    return numbers.to(dtype).view(shape)


def reduced(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The reduction as PyTorch computes it in one process; 16-bit floats are accumulated in float32."""
    dtype = parts[0].dtype
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(dtype, dtype)
    if dtype in {torch.uint16, torch.uint32, torch.uint64}:
        wide = torch.int64
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = OPS[name](total, part.to(wide))
    if name == "AVG":
        total = (
            torch.view_as_complex(torch.view_as_real(total) / len(parts)) if dtype.is_complex else total / len(parts)
        )
    return total.to(dtype)


def ops_of(dtype: torch.dtype) -> list[str]:
    if dtype.is_complex:
        return ["SUM", "AVG", "PRODUCT"]
    if dtype.is_floating_point:
        return ["SUM", "PRODUCT", "MIN", "MAX", "AVG"]
    return ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def same(found: Tensors, expected: Tensors, what: object = "") -> None:
    """The bits, types and shapes of a tensor, or of each of several."""
    if not isinstance(found, torch.Tensor):
        for one, other in zip(found, expected, strict=True):
            same(one, other, what)
        return
    assert found.dtype == expected.dtype, what
    assert found.shape == expected.shape, what
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[found.element_size()]
    one, other = (t.detach().contiguous().view(-1).view(bits) for t in (found, expected))
    assert torch.equal(one, other), f"{what}: {found} instead of {expected}"


def same_on_all_ranks(found: Tensors, what: object = "") -> None:
    """Collective."""
    for tensor in [found] if isinstance(found, torch.Tensor) else found:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        same(tensor, first, f"{what} differs between ranks")


class Ranks:
    """This rank, and the group, with so many ranks on each host."""

    def __init__(self, rank: int, counts: list[int]) -> None:
        self.rank, self.size = rank, sum(counts)
        self.counts = counts
        self.all = range(self.size)
        self._groups: list[dist.ProcessGroup] = []
        # How tensors lie is the same matter on one host and on several, where a call takes longer.
        self.layouts = {name: LAYOUTS[name] for name in (LAYOUTS if len(counts) == 1 else ("transposed", "empty"))}

    @cached_property
    def gloo(self) -> dist.ProcessGroup:
        """Collective at its first use. The ranks' group of Gloo's."""
        return group_with_gloo(self.all)

    def group(self, **options: object) -> dist.ProcessGroup:
        """Collective. Another group of all ranks, for one check."""
        self._groups.append(dist.new_group(list(self.all), **options))
        return self._groups[-1]

    def destroy_groups(self) -> None:
        """Collective. Those of `group`."""
        while self._groups:
            dist.destroy_process_group(self._groups.pop())

    def each(
        self, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 5, 3), *, offset: int = 0
    ) -> list[torch.Tensor]:
        """`values(rank + offset, ...)` of all ranks."""
        return [values(q + offset, dtype, shape) for q in self.all]

    def total(
        self, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 5, 3), *, offset: int = 0
    ) -> torch.Tensor:
        """The sum of `values(rank + offset, ...)` over all ranks."""
        return reduced("SUM", self.each(dtype, shape, offset=offset))

    def same_as_gloo(self, ours: Tensors, theirs: Tensors, what: object = "", **tolerances: float) -> None:
        """Compare tensors one by one. With more than two ranks Gloo sums in another order, so the bits differ."""
        if self.size == 2:
            same(ours, theirs, what)
        else:
            torch.testing.assert_close([*ours], [*theirs], **tolerances)


def open_files() -> int:
    """Descriptors of this process, without those of garbage."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def with_error(kind: type[BaseException], text: str, function: object, *args: object, **named: object) -> None:
    with pytest.raises(kind, match=text) as caught:
        function(*args, **named)
    assert not isinstance(caught.value, DistoptError), "users of PyTorch catch PyTorch's kinds of error"
