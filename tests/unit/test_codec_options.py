"""Codecs: refused arguments, and names."""

import pickle

import numpy as np
import pytest

from distopt import codecs
from distopt.codecs import (
    CODECS,
    BFloat16,
    ChunkedTopK,
    ErrorFeedback,
    Fp16,
    Fp32,
    PendingReduction,
    PowerSGD,
    Quantized,
    Threshold,
    TopK,
    create,
    finish_all,
)
from distopt.errors import UsageError
from distopt.opt import DIST_OPTIONS, codec_of
from tests.conformance.thread_ranks import on_ranks

F32 = np.float32


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopK(0.0),
        lambda: TopK(1.01),
        lambda: TopK(float("nan")),
        lambda: TopK(),
        lambda: TopK(0.1, k=3),
        lambda: TopK(k=0),
        lambda: TopK(k=3, warm_up_steps=5),
        lambda: TopK(0.1, warm_up_steps=-1),
        lambda: TopK(0.1, momentum=1.0),
        lambda: TopK(0.1, clip_norm=0.0),
        lambda: Threshold(-0.1),
        lambda: Threshold(float("nan")),
        lambda: Threshold(float("inf")),
        lambda: Fp16(scale=0.0),
        lambda: BFloat16(scale="often"),
        lambda: ErrorFeedback(Fp32()),
        lambda: ErrorFeedback(ErrorFeedback(TopK(0.1))),
        lambda: create("top"),
        lambda: create("top-k", ratio=0.0),
        lambda: create("threshold", bound=-1.0),
        lambda: create("top-k"),
        lambda: create("fp16", ratio=0.1),
        lambda: create("fp32", error_feedback=True),
        lambda: PowerSGD(rank=0),
        lambda: ChunkedTopK(0),
        lambda: ChunkedTopK(4097),
        lambda: ChunkedTopK(64, bits=3),
        lambda: Quantized(16),
        lambda: Quantized(seed=-1),
        lambda: ErrorFeedback(TopK(0.1), decay=0.0),
        lambda: ErrorFeedback(TopK(0.1), decay=1.1),
        lambda: create("top-k", ratio=0.1, decay=0.9),
    ],
)
def test_bad_options_are_refused(make):
    with pytest.raises(UsageError):
        make()


def test_bad_buckets_are_refused():
    def body(comm):
        for bucket in [np.zeros(4), np.zeros(4, np.int32), np.zeros((2, 2), F32), np.zeros(8, F32)[::2], [1.0]]:
            with pytest.raises(UsageError):
                Fp16().attach(bucket, comm)
        for codec in [TopK(0.1, momentum=0.9), Threshold(1.0, clip_norm=1.0)]:
            with pytest.raises(UsageError, match="ErrorFeedback"):
                codec.attach(np.zeros(4, F32), comm)

    on_ranks(1, body)


@pytest.mark.parametrize(
    "codec", [Fp32(), Fp16("dynamic"), BFloat16(), TopK(0.1, momentum=0.9), ErrorFeedback(Threshold(0.5))], ids=repr
)
def test_codecs_are_values(codec):
    assert pickle.loads(pickle.dumps(codec)) == codec
    assert hash(codec) == hash(pickle.loads(pickle.dumps(codec)))


def test_registry():
    assert list(CODECS) == ["fp32", "fp16", "bf16", "top-k", "chunked-top-k", "threshold", "quantized", "power-sgd"]
    assert create("top-k", ratio=0.02, error_feedback=True) == ErrorFeedback(TopK(0.02))
    assert create("threshold", bound=0.02) == Threshold(0.02)
    assert create("quantized", bits=4, error_feedback=True, decay=0.9) == ErrorFeedback(Quantized(4), decay=0.9)
    assert create("fp16", scale="dynamic") == Fp16("dynamic")
    with pytest.raises(UsageError, match="fp32, fp16, bf16, top-k, chunked-top-k, threshold, quantized, power-sgd"):
        create("fp64")
    with pytest.raises(UsageError, match=r"codec 'fp16' takes no ratio=; it takes scale=, see distopt.codecs.Fp16"):
        create("fp16", ratio=0.5)
    with pytest.raises(UsageError, match=r"'fp32' .*leave error_feedback= out"):
        create("fp32", error_feedback=True)


@pytest.mark.parametrize("name", CODECS)
def test_an_option_that_is_missing_is_named(name):
    """As the argument to add to the call: of fronts that take options, and of those that take a codec alone."""
    needed = {"top-k": "ratio= or k=", "threshold": "bound="}.get(name)
    if needed is None:
        assert isinstance(create(name), CODECS[name])
        assert codecs.codec_of(name) == create(name)
        return
    option = needed.partition("=")[0]
    for options in ({}, {"error_feedback": True}):
        with pytest.raises(UsageError, match=rf"needs {needed}: add {option}=0.01, .* after '{name}'"):
            create(name, **options)
    with pytest.raises(UsageError, match=rf"needs {needed}, .* codec=distopt.codecs.(.*)$") as e:
        codecs.codec_of(name)
    call = str(e.value).rpartition("codecs.")[2]
    assert eval(call, {"create": create}) == create(name, **{option: 0.01})


def test_names_of_singa():
    assert codec_of("plain") == codec_of("fp32") == Fp32()
    assert codec_of("half", 7.0) == codec_of("fp16") == Fp16()
    assert codec_of("sparseTopK", 0.02) == ErrorFeedback(TopK(0.02))
    assert codec_of("sparseThreshold", 0.02, corr=False) == Threshold(0.02)
    for name in DIST_OPTIONS:
        if name != "partialUpdate":
            codec_of(name)
    with pytest.raises(UsageError, match="plain, fp32, half, fp16, bf16, partialUpdate, sparseTopK, sparseThreshold"):
        codec_of("fp64")


def test_decay_fades_the_residual():
    def body(comm):
        rank = comm.topology.rank
        codec = ErrorFeedback(TopK(k=1), decay=0.5)
        bucket = comm.empty(3)
        state = codec.attach(bucket, comm)
        means = []
        for gradient in ([8, 2, 1 + rank], [0, 0, 0], [0, 0, 0]):
            bucket[:] = gradient
            assert finish_all([PendingReduction(codec, state)]) == [None]
            means.append(bucket.tolist())
        return means, state.residual.tolist()

    (means, left), (_, other) = on_ranks(2, body)
    # After a step, half of what was not sent is left; rank 1 sends the lower index of its two equal elements first.
    assert means == [[8, 0, 0], [0, 1, 0], [0, 0, 0.375]]
    assert (left, other) == ([0, 0, 0], [0, 0, 0])
