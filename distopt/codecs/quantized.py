"""Integers of 8, 4 or 2 bits on the wire."""

from __future__ import annotations

import zlib
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

from .. import _core
from ..checks import check_integer
from ..comm.base import Array, RaggedWork, Work
from ..errors import UsageError
from ..kernels import array_module
from .base import Codec
from .reduction import CodecState, Steps

_BITS = (8, 4, 2)


@dataclass(frozen=True)
class Quantized(Codec):
    """Blocks of 256 elements as integers with a common scale, from -(2^(bits - 1) - 1) to 2^(bits - 1) - 1.

    The blocks are those of Dettmers et al. (arXiv 2110.02861, section 2.1), their levels equally distant; stochastic
    rounding is that of QSGD (Alistarh et al., arXiv 1610.02132, section 3.1), which keeps the mean. With 2 bits, an
    element is -1, 0 or 1 times the scale, as in TernGrad (Wen et al., arXiv 1705.07878). csrc/cpu/blocks.h has the
    format.

    Each rank sums a part of the bucket in float32 and sends its mean, encoded once more, to all: a rank sends as many
    bytes as in a dense reduction of so few bits. Two ranks send each other all, which is encoded once. The residual of
    error feedback covers both encodings.

    Args:
        bits: of an element: 8, 4 or 2.
        stochastic: whether to round up or down at random, in proportion to the distances, in place of to the nearest.
        seed: of the random numbers; they also follow from the first parameter's name, the step, the rank and the place.
    """

    bits: int = 8
    _: KW_ONLY
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in _BITS:
            raise UsageError(f"bits={self.bits!r} of a quantized codec; choose 8, 4 or 2")
        object.__setattr__(self, "seed", check_integer("the seed of a quantized codec", self.seed, 0))

    @cached_property
    def kind(self) -> str:
        """Name of the codec with its bits, on which the wire memory depends."""
        return f"Quantized({self.bits})"

    @property
    def wire_format(self) -> int:
        """Version of the format of blocks in csrc/cpu/blocks.h."""
        return 1

    def prepare(self, state: CodecState) -> None:
        """Collective. Make wire memory for the blocks of this rank and of all ranks."""
        size, world_size, xp = state.bucket.size, state.topology.world_size, array_module(state.bucket)
        n_parts = world_size if world_size > 2 else 1
        part = -(-size // (n_parts * _core.quantized_block)) * _core.quantized_block
        # The last parts may be short, or empty.
        state.memory["parts"] = [slice(min(i * part, size), min((i + 1) * part, size)) for i in range(n_parts)]
        state.memory["wire"] = state.empty(self._n_bytes(size), "uint8", xp=xp)
        gathered = state.empty(self._n_bytes(part) * world_size, "uint8", xp=xp)
        state.memory["gathered"] = gathered.reshape(world_size, -1)
        state.memory["lost"] = state.kernels.empty(part if n_parts > 1 else 0, "float32")
        state.memory["findings"] = xp.zeros_like(state.findings)  # of means, which are finite
        self._step(state)

    def reduce(self, state: CodecState) -> Steps:
        """Collective. Exchange encoded blocks; among more than two ranks, each averages a part, and sends it to all."""
        kernels, bucket, wire, gathered = state.kernels, state.bucket, state.memory["wire"], state.memory["gathered"]
        parts, rank, world_size = state.memory["parts"], state.topology.rank, state.topology.world_size
        step, residuals = self._step(state), state.renew_residual()
        kernels.encode_blocks(bucket, residuals, wire, self.bits, self._seed(state, step, "own"), state.findings)
        bounds = [(self._n_bytes(part.start), self._n_bytes(part.stop)) for part in parts]
        with state.comm.together():
            sent = state.send_header()
            work: Work
            if len(parts) > 1:
                work = state.all_to_all_ragged([wire[begin:end] for begin, end in bounds])
            else:
                work = state.all_gather(wire, gathered.reshape(-1))
        yield sent
        yield work
        header = state.read_header(sent, may_stay=True)
        if header.is_bad:
            return header.verdict
        mine = parts[rank % len(parts)]
        for i, encoded in enumerate(work.parts if isinstance(work, RaggedWork) else gathered):
            kernels.decode_blocks(encoded, bucket[mine], self.bits, 1 / world_size, i > 0)
        if len(parts) > 1:
            yield self._send_mean(state, mine, residuals[1], self._seed(state, step, "mean"))
            for part, (begin, end), encoded in zip(parts, bounds, gathered, strict=True):
                kernels.decode_blocks(encoded[: end - begin], bucket[part], self.bits, 1.0, False)
        return header.verdict

    def _send_mean(self, state: CodecState, mine: slice, residual: Array | None, seed: int | None) -> Work:
        """Encode the mean of this rank's part; what that loses counts world_size times in the residual of one rank."""
        gathered, lost = state.memory["gathered"], state.memory["lost"][: mine.stop - mine.start]
        own = gathered[state.topology.rank]
        lost.fill(0)
        encoded = own[: self._n_bytes(lost.size)]
        kept = (None, None) if residual is None else (lost, lost)
        state.kernels.encode_blocks(state.bucket[mine], kept, encoded, self.bits, seed, state.memory["findings"])
        if residual is not None:
            lost *= state.topology.world_size
            residual[mine] += lost
        return state.all_gather(own, gathered.reshape(-1))

    def _n_bytes(self, n: int) -> int:
        n_bytes: int = _core.blocks_bytes(n, self.bits)
        return n_bytes

    def _step(self, state: CodecState) -> int:
        return state.count_reduction() if self.stochastic else 0

    def _seed(self, state: CodecState, step: int, use: str) -> int | None:
        if not self.stochastic:
            return None
        return zlib.crc32(f"{self.seed} {state.parts[0].name} {step} {state.topology.rank} {use}".encode())
