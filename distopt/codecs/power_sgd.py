"""PowerSGD: matrices of gradients as products of two thin matrices (Vogels et al., arXiv 1905.13727, algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from ..checks import check_integer
from ..comm.base import Array
from ..kernels import FROM_BAD, array_module
from .base import Codec
from .kept_arrays import Part
from .reduction import CodecState, Steps


class _Matrix(NamedTuple):
    """A parameter sent as a product: its part; views of the mean M [n, m], of P [n, r] and Q [m, r]; the first Q."""

    part: Part
    mean: Array
    p: Array
    q: Array
    start: Array


class _Vector(NamedTuple):
    """A parameter averaged densely: its place in the bucket, and views of the mean and of its place on the wire."""

    part: Part
    mean: Array
    sent: Array


@dataclass(frozen=True)
class PowerSGD(Codec):
    """Sends each gradient M [n, m] as P [n, rank] and Q [m, rank], with M close to P Q^T. Use it with `ErrorFeedback`.

    A step is one of subspace iteration, from the Q of the step before: P = mean of M Q, orthogonalised; Q = mean of
    M^T P; the mean of M is P Q^T. A parameter of more dimensions counts as a matrix of the first by all others. Those
    of one dimension, or too small to gain anything, are averaged densely.

    All ranks compute the same bits from P and Q: after the all-reduces come only elementwise operations and sums in a
    fixed order, no BLAS, whose order depends on the processor.

    Args:
        rank: columns of P and Q.
    """

    rank: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", check_integer("rank of PowerSGD", self.rank, 1))

    @cached_property
    def kind(self) -> str:
        """Name of the codec with its rank, because memory and state depend on the rank."""
        return f"PowerSGD({self.rank})"

    def prepare(self, state: CodecState) -> None:
        """Collective. Make wire memory for P, Q and the dense parameters, and choose the first Q."""
        xp, dtype, r = array_module(state.bucket), state.bucket.dtype.name, self.rank
        sides = {part: (part.shape[0], prod(part.shape[1:])) for part in state.parts if len(part.shape) > 1}
        sides = {part: (n, m) for part, (n, m) in sides.items() if r * (n + m) < n * m}
        rows, columns = (r * sum(side[i] for side in sides.values()) for i in (0, 1))
        others = state.size - sum(part.size for part in sides)
        ps = state.memory["p"] = state.empty(rows + others, dtype, xp=xp)  # dense ones travel behind P
        qs = state.memory["q"] = state.empty(columns, dtype, xp=xp)
        # The longest sum of products, over the ranks; with factors below the limit, it stays finite.
        longest = 4 * max([1, *map(max, sides.values())]) * state.topology.world_size
        state.memory["limit"] = float(np.finfo(dtype).max) / longest
        state.memory["matrices"], state.memory["vectors"] = [], []
        p, q, dense = 0, 0, rows
        for part in state.parts:
            place = slice(part.offset, part.offset + part.size)
            mean = state.bucket[place]
            if part in sides:
                n, m = sides[part]
                in_p, in_q = slice(p, p + n * r), slice(q, q + m * r)
                # It depends on the parameter's name alone: the same on all ranks, and in buckets of any size.
                random = np.random.default_rng([*part.name.encode()])
                first_q = xp.asarray(random.standard_normal(m * r).astype(dtype))
                state.keep("q", first_q, part)
                factors = ps[in_p].reshape(n, r), *(q.reshape(m, r) for q in (qs[in_q], first_q))
                state.memory["matrices"].append(_Matrix(part, mean.reshape(n, m), *factors))
                p, q = in_p.stop, in_q.stop
            else:
                state.keep("q", xp.empty(0, dtype), part)  # every parameter has states, or some are missing
                state.memory["vectors"].append(_Vector(part, mean, ps[dense : dense + part.size]))
                dense += part.size

    def reduce(self, state: CodecState) -> Steps:
        """Collective. An all-reduce of P and the dense parameters, then one of Q."""
        xp = array_module(state.bucket)
        matrices, vectors = state.memory["matrices"], state.memory["vectors"]
        limit, (residual, new_residual) = state.memory["limit"], state.renew_residual()
        total = state.bucket if residual is None else xp.add(residual, state.bucket, out=new_residual)
        state.kernels.find_beyond(total, limit, state.findings[FROM_BAD : FROM_BAD + 1])

        def gradient(own: _Matrix | _Vector) -> Array:
            return total[own.part.offset : own.part.offset + own.part.size].reshape(own.mean.shape)

        with np.errstate(over="ignore", invalid="ignore"):  # by bad gradients, which the verdict names
            for own in matrices:
                xp.matmul(gradient(own), state.keep("q", part=own.part).reshape(own.start.shape), out=own.p)
        for vector in vectors:
            vector.sent[...] = gradient(vector)
        header = state.send_header()
        work = state.all_reduce(state.memory["p"], "mean")
        yield header
        yield work
        verdict = state.read_header(header, f"NaN, infinite or, beyond {limit:.2g}, too large for PowerSGD").verdict
        if verdict is not None:
            if residual is not None and not bool((abs(residual) <= limit).all()):
                residual.fill(0)  # no step could ever send it
            return verdict
        for own in matrices:
            _orthogonalise(own.p)
            xp.matmul(gradient(own).T, own.p, out=own.q)
        yield state.all_reduce(state.memory["q"], "mean")
        for own in matrices:
            # A column of zeros would stay zero, and a copy of another column would become zero.
            last_q, next_q = (q.reshape(own.start.shape) for q in state.renew("q", part=own.part))
            next_q[...] = xp.where(own.p.any(axis=0), own.q, last_q)
            _orthogonalise(next_q)  # the next P keeps its directions, without a tiny scale
            next_q[...] = xp.where(next_q.any(axis=0), next_q, own.start)
            own.mean[...] = own.p[:, :1] * own.q[:, 0]
            for k in range(1, self.rank):
                own.mean[...] += own.p[:, k : k + 1] * own.q[:, k]
        for vector in vectors:
            vector.mean[...] = vector.sent
        if residual is not None:
            total -= state.bucket
        return None


def _orthogonalise(p: Array) -> None:
    """Gram and Schmidt's process on the columns, in order (section 3 of the paper), in place. Zeros stay zeros.

    A column in the span of the columns before it also becomes zero: the remainder that rounding leaves is in that span,
    and would, normalized, count the same content twice.
    """
    xp = array_module(p)
    eps = np.finfo(p.dtype).eps

    def dot(a: Array, b: Array) -> Array:
        return xp.multiply(a, b, dtype=np.float64).sum()

    for k in range(p.shape[1]):
        column = p[:, k]
        column[...] = xp.ldexp(column, -xp.frexp(abs(column).max())[1])  # exact; denormal numbers have too few bits
        noise = eps * xp.sqrt(dot(column, column))
        # Twice: after the first time, rounding errors may be all that is left of the column.
        for j in (*range(k), *range(k)):
            column -= (dot(p[:, j], column) * p[:, j]).astype(p.dtype)
        norm = xp.sqrt(dot(column, column))
        column /= xp.where(norm > noise, norm, np.inf).astype(p.dtype)
