"""What a rank says about an operation before any data moves, so that ranks which disagree find out."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["FINGERPRINT_BYTES", "Fingerprint", "agree", "pack"]

# Sequence number and root; kind, dtype, op, label and its hash; count. Fixed in size: ranks read it before they agree.
# The count is last because the counts of a ragged operation may differ.
_FRONT, _TEXTS, _COUNT = struct.Struct("<QI"), struct.Struct("<20s8s8s32s8s"), struct.Struct("<Q")
FINGERPRINT_BYTES = _FRONT.size + _TEXTS.size + _COUNT.size
_SHOWN_LABEL_BYTES = 31
_RAGGED = (b"all_gather_ragged", b"all_to_all_ragged")


@dataclass(frozen=True)
class Fingerprint:
    """An operation in words; `dtype` and `op` are empty where they have no meaning."""

    seq: int
    root: int
    kind: str
    dtype: str
    op: str
    label: str
    count: int

    @classmethod
    def unpack(cls, data: bytes) -> Fingerprint:
        """The inverse of `pack`."""
        seq, root = _FRONT.unpack_from(data)
        *texts, _ = _TEXTS.unpack_from(data, _FRONT.size)
        kind, dtype, op, label = (text.rstrip(b"\0").decode() for text in texts)
        return cls(seq, root, kind, dtype, op, label, *_COUNT.unpack_from(data, _FRONT.size + _TEXTS.size))

    def __str__(self) -> str:
        text = f"{self.kind} #{self.seq}"
        if self.dtype:
            text += f" of {self.count} {self.dtype}"
        if self.op:
            text += f" ({self.op})"
        if self.kind == "broadcast":
            text += f" from rank {self.root}"
        return f"{text} {self.label!r}" if self.label else text


def pack(seq: int, kind: str, dtype: str, *, count: int, op: str, root: int, label: str) -> bytes:
    """The `FINGERPRINT_BYTES` bytes to exchange. Of a long label its beginning and a hash travel."""
    return _FRONT.pack(seq, root) + _pack_texts(kind, dtype, op, label) + _COUNT.pack(count)


def agree(mine: bytes, theirs: bytes) -> bool:
    """Whether both are the same operation."""
    if mine == theirs:
        return True
    ragged = mine.startswith(_RAGGED, _FRONT.size)
    return ragged and mine[: -_COUNT.size] == theirs[: -_COUNT.size]


@lru_cache(maxsize=1024)
def _pack_texts(kind: str, dtype: str, op: str, label: str) -> bytes:
    text = label.encode()
    shown = text[:_SHOWN_LABEL_BYTES].decode(errors="ignore").encode()
    return _TEXTS.pack(kind.encode(), dtype.encode(), op.encode(), shown, hashlib.blake2b(text, digest_size=8).digest())
