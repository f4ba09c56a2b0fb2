"""The largest elements of every chunk of 4,096, in a few bits each."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property

from .. import _core
from ..checks import check_integer
from ..errors import UsageError
from ..kernels import array_module
from .base import Codec
from .reduction import CodecState, Steps

_BITS = (2, 4, 8, 16)


@dataclass(frozen=True)
class ChunkedTopK(Codec):
    """The k elements of largest magnitude of each chunk of 4,096, positions in 12 bits and values in a few.

    The chunks are those of DeMo (Peng et al., arXiv 2411.19870), without its cosine transform, and few bits a value
    those of SparseLoCo (Sarfi et al., arXiv 2508.15706, algorithm 1): with 64 elements in 2 bits, a chunk of 16 KiB
    takes 116 bytes. SparseLoCo is `DiLoCo` with `ErrorFeedback(ChunkedTopK(64), decay=beta)` and an outer optimizer
    without momentum. A value has a sign, and one of 2^(bits - 1) magnitudes at equal distances between two that are
    sent for each chunk; csrc/cpu/chunks.h has the format.

    Every rank sends its elements to all others, which add them up in the order of the ranks: the bytes grow with the
    number of ranks.

    Args:
        k: elements of a chunk, 1 to 4,096; of the last one, which may be shorter, a like share, rounded up.
        bits: of a value: 2, 4, 8 or 16.
    """

    defers = False  # the residual is replaced in place

    k: int = 64
    _: KW_ONLY
    bits: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", check_integer("k of chunked top-K", self.k, 1))
        if self.k > _core.top_chunk:
            raise UsageError(f"k={self.k} of chunked top-K exceeds the chunk; choose 1 to {_core.top_chunk}")
        if self.bits not in _BITS:
            raise UsageError(f"bits={self.bits!r} of chunked top-K; choose 2, 4, 8 or 16")

    @cached_property
    def kind(self) -> str:
        """Name of the codec with its options, on which the wire memory depends."""
        return f"ChunkedTopK({self.k}, {self.bits})"

    @property
    def wire_format(self) -> int:
        """Version of the format in csrc/cpu/chunks.h."""
        return 1

    def prepare(self, state: CodecState) -> None:
        """Collective. Make wire memory for the chunks of this rank and of all ranks."""
        n_bytes, xp = _core.chunks_bytes(state.bucket.size, self.k, self.bits), array_module(state.bucket)
        state.memory["wire"] = state.empty(n_bytes, "uint8", xp=xp)
        gathered = state.empty(n_bytes * state.topology.world_size, "uint8", xp=xp)
        state.memory["gathered"] = gathered.reshape(state.topology.world_size, n_bytes)

    def reduce(self, state: CodecState) -> Steps:
        """Collective. All ranks gather the elements that each has chosen, and add them up in the order of the ranks."""
        bucket, wire, gathered = state.bucket, state.memory["wire"], state.memory["gathered"]
        # The next residual waits in the bucket, which nothing else needs until the means are decoded.
        residuals = (None, None) if state.residual is None else (state.residual, bucket)
        state.kernels.encode_chunks(bucket, residuals, wire, self.k, self.bits, state.findings)
        with state.comm.together():
            sent = state.send_header()
            work = state.all_gather(wire, gathered.reshape(-1))
        yield sent
        yield work
        verdict = state.read_header(sent).verdict
        if verdict is None:
            yield None
            if state.residual is not None:
                state.residual[...] = bucket
            state.kernels.decode_chunks(gathered, bucket, self.k, self.bits, 1 / len(gathered))
        return verdict
