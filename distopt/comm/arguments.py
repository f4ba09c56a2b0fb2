"""The checks of arguments, which all communicators share. A transport says what it takes, and calls none of them."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import numpy as np

from ..checks import check_integer
from ..errors import UsageError
from ..kernels import check_unmasked
from ..launch.job.topology import Topology
from .types import DTYPES, NAMES, OPS, is_defined
from .work import Array


class Arguments:
    """The arguments that a communicator takes.

    Attributes:
        name: of the transport.
        dtypes: the keys of `DTYPES` that it moves.
        ops: the keys of `OPS` that it has.
        xp: its own array module, numpy or cupy.
        topology: of its ranks.
    """

    name: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    ops: ClassVar[tuple[str, ...]] = tuple(OPS)
    xp: Any = np
    topology: Topology

    def _moves(self, xp: Any) -> bool:
        """Whether wire memory can be arrays of that module; a backend may say otherwise."""
        return xp is self.xp

    def check_array(self, array: Array, wire: str | None = None, *, written: bool = False) -> str:
        """Local. The wire type of `array`, or an error that says why it cannot be sent; all collectives ask here.

        Args:
            array: NumPy's on every transport; CuPy's where the transport moves them.
            wire: see `all_reduce`.
            written: whether it receives a result.

        Raises:
            UsageError: module, type, byte order, layout, alignment or writability do not fit.
        """
        on_host = isinstance(array, np.ndarray)
        if type(array) is not np.ndarray:
            check_unmasked(array)
        if not on_host:
            cupy = sys.modules.get("cupy")
            if cupy is None or not isinstance(array, cupy.ndarray):
                raise UsageError(
                    f"an object of type {type(array).__name__} cannot be sent; pass an array of NumPy or CuPy"
                )
            if not self._moves(cupy):
                raise self._cannot_move(cupy)
        dtype = NAMES.get(array.dtype)
        if dtype is None:
            if not array.dtype.isnative:
                order = "big" if sys.byteorder == "little" else "little"
                raise UsageError(
                    f"a {order}-endian array cannot be sent; pass array.astype(array.dtype.newbyteorder('='))"
                )
            dtype = array.dtype.name
        if wire is not None and wire != dtype:
            if (dtype, wire) != ("uint16", "bfloat16"):
                raise UsageError(f"an array of {dtype} cannot travel as {wire}")
            dtype = wire
        if dtype not in self.dtypes:
            raise UsageError(f"arrays of {dtype} cannot be sent; convert to one of {', '.join(self.dtypes)}")
        flags = array.flags
        if not flags.c_contiguous:
            raise UsageError(
                "a strided array cannot be sent or reduced in place; pass a contiguous one (numpy.ascontiguousarray)"
            )
        if not (flags.aligned if on_host else array.data.ptr % array.itemsize == 0):
            raise UsageError(
                f"an array that is not aligned to its {array.itemsize}-byte items cannot be sent; pass array.copy()"
            )
        if written and on_host and not flags.writeable:
            raise UsageError("a read-only array cannot receive the result; pass a writable one")
        return dtype

    def can_reduce(self, op: str, dtype: str) -> bool:
        """Local. Whether this transport has the reduction `op` for that wire type."""
        return dtype in self.dtypes and op in self.ops and is_defined(op, dtype)

    def _check_op(self, op: str, dtype: str) -> None:
        if op not in self.ops:
            raise UsageError(f"unknown reduction {op!r}; choose one of {', '.join(self.ops)}")
        if not is_defined(op, dtype):
            cure = "not be an integer; use op='sum'" if op == "mean" else "be one of their bits; use an integer type"
            raise UsageError(f"the {op} of {dtype} would {cure}")
        if not self.can_reduce(op, dtype):
            raise UsageError(f"the {self.name} communicator has no {op} of {dtype}; reduce another type")

    def _check_pair(self, part: Array, whole: Array) -> None:
        if part.dtype != whole.dtype or part.size * self.topology.world_size != whole.size:
            raise UsageError(
                f"parts of {part.size} {part.dtype} do not make a whole of {whole.size} {whole.dtype} "
                f"on {self.topology.world_size} ranks"
            )
        check_kinds(part, whole)
        rank, count, offset_bytes = self.topology.rank, part.size, _address(part) - _address(whole)
        if count and -part.nbytes < offset_bytes < whole.nbytes and offset_bytes != rank * part.nbytes:
            raise UsageError(
                f"input and output overlap, and the smaller one is not rank {rank}'s part of the larger one, "
                f"[{rank * count}:{(rank + 1) * count}] of it; pass a copy of the input, array.copy()"
            )

    def _cannot_move(self, xp: Any) -> UsageError:
        return UsageError(
            f"the {self.name} communicator moves {self.xp.__name__} arrays, and these are of {xp.__name__}; put model "
            "and batches on DistOpt.device, or stay on the CPU with DISTOPT_DEVICE=cpu"
        )

    def _other(self, rank: int) -> int:
        rank = check_integer("the rank of a message", rank)
        if not 0 <= rank < self.topology.world_size or rank == self.topology.rank:
            raise UsageError(
                f"rank {rank} is not another rank of a world of {self.topology.world_size}; messages go to another rank"
            )
        return rank


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr)


def check_kinds(*arrays: Array) -> None:
    """Local. Raises a UsageError if arrays of NumPy and CuPy are mixed."""
    if len({isinstance(array, np.ndarray) for array in arrays}) > 1:
        raise UsageError("one array is NumPy's and the other CuPy's; pass all of one kind")
