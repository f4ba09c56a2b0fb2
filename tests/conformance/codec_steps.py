"""A rank's steps with codecs, for ranks that are processes: importable by name."""

from contextlib import nullcontext

import numpy as np

from distopt.codecs import (
    BFloat16,
    ChunkedTopK,
    Codec,
    ErrorFeedback,
    Fp16,
    Fp32,
    Part,
    PendingReduction,
    PowerSGD,
    Quantized,
    Threshold,
    TopK,
    finish_all,
)
from distopt.comm import TRANSPORTS, Communicator
from distopt.kernels import kernels_of
from distopt.launch.job.base import Job
from instruments.emulation import activate
from tests.conformance.run import load

CODECS = [
    Fp32(),
    Fp16(),
    BFloat16(),
    ErrorFeedback(Fp16("dynamic")),
    TopK(1.0),
    TopK(0.01),
    Threshold(2.0),
    Threshold(100.0),
    ErrorFeedback(TopK(0.01, momentum=0.9, clip_norm=20.0)),
    ErrorFeedback(Threshold(1.5)),
    ErrorFeedback(PowerSGD(rank=2)),
    ErrorFeedback(ChunkedTopK(100, bits=4), decay=0.9),
    ErrorFeedback(Quantized(4, stochastic=True)),
    Quantized(8),
]


def algorithm(codec: Codec) -> type[Codec]:
    """The class of a codec, without error feedback."""
    return type(codec.codec if isinstance(codec, ErrorFeedback) else codec)


def gradient(step: int, codec: int, rank: int, size: int) -> np.ndarray:
    rng = np.random.default_rng([step, codec, rank])
    return rng.standard_normal(size).astype(np.float32) * np.float32((1 + rank) / 2)


def parts_of(size: int) -> list[Part]:
    """A matrix, as large as fits, and the rest."""
    side = int(size**0.5)
    return [Part("matrix", 0, (side, side)), Part("rest", side * side, (size - side * side,))]


def steps_of(comm: Communicator, size: int) -> list[np.ndarray]:
    """Three steps with a bucket per codec, all under way together; in the second a gradient is NaN."""
    rank = comm.topology.rank
    buckets = [comm.empty(size) for _ in CODECS]
    labelled = [(codec, bucket, f"b{i}") for i, (codec, bucket) in enumerate(zip(CODECS, buckets, strict=True))]
    reducers = [codec.attach(bucket, comm, parts=parts_of(size), label=label) for codec, bucket, label in labelled]
    results = []
    for step in range(3):
        for i, bucket in enumerate(buckets):
            grad = gradient(step, i, rank, size)
            if step == 1 and rank == comm.topology.world_size - 1:
                grad[size // 2] = np.nan
            kernels_of(bucket).copy_into(bucket, grad)
        verdicts = finish_all(list(map(PendingReduction, CODECS, reducers)))
        for codec, verdict in zip(CODECS, verdicts, strict=True):
            expected = (comm.topology.world_size - 1, size // 2) if step == 1 else None
            assert (verdict and (verdict.rank, verdict.element)) == expected, f"the verdict of {codec} in step {step}"
        if step != 1:
            results += [kernels_of(bucket).to_host(bucket) for bucket in buckets]
    comm.barrier()
    return results


def on_transport(job: Job, transport: str, sizes: list[int]) -> list[list[np.ndarray]]:
    if transport not in ("shm", "single"):
        activate()
    with load(TRANSPORTS.get(transport, transport)).create(job) as comm:
        results = []
        for size in sizes:
            with nullcontext() if comm.xp is np else comm.xp.cuda.Stream(non_blocking=True):
                results.append(steps_of(comm, size))
        return results
