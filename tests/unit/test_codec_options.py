"""Codecs: refused arguments, and names."""

import pickle
from functools import partial

import numpy as np
import pytest

from distopt import codecs
from distopt.codecs import ErrorFeedback, Fp16, Fp32, PowerSGD, Quantized, Threshold, TopK, create
from distopt.errors import UsageError
from distopt.opt import DIST_OPTIONS, codec_of
from tests.conformance.thread_ranks import on_ranks
from tests.unit.refusals import refused

F32 = np.float32


# By the codec: what it is called with.
BAD = {
    TopK: [(0.0,), (1.01,), (float("nan"),), (), {"ratio": 0.1, "k": 3}, {"k": 0}, {"k": 3, "warm_up_steps": 5}],
    partial(TopK, 0.1): [{"warm_up_steps": -1}, {"momentum": 1.0}, {"clip_norm": 0.0}],
    Threshold: [(-0.1,), (float("nan"),), (float("inf"),)],
    Fp16: [{"scale": 0.0}],
    codecs.BFloat16: [{"scale": "often"}],
    ErrorFeedback: [(Fp32(),), (ErrorFeedback(TopK(0.1)),)],
    partial(ErrorFeedback, TopK(0.1)): [{"decay": 0.0}, {"decay": 1.1}],
    create: [("top",), ("top-k",)],
    partial(create, "top-k"): [{"ratio": 0.0}, {"ratio": 0.1, "decay": 0.9}],
    partial(create, "threshold"): [{"bound": -1.0}],
    partial(create, "fp16"): [{"ratio": 0.1}],
    partial(create, "fp32"): [{"error_feedback": True}],
    PowerSGD: [{"rank": 0}],
    codecs.ChunkedTopK: [(0,), (4097,), {"k": 64, "bits": 3}],
    Quantized: [(16,), {"seed": -1}],
}


@pytest.mark.parametrize("make", BAD)
def test_bad_options_are_refused(make):
    for given in BAD[make]:
        call = partial(make, **given) if isinstance(given, dict) else partial(make, *given)
        refused(UsageError, "", call)


def test_bad_buckets_are_refused():
    def body(comm):
        for bucket in [np.zeros(4), np.zeros(4, np.int32), np.zeros((2, 2), F32), np.zeros(8, F32)[::2], [1.0]]:
            refused(UsageError, "", Fp16().attach, bucket, comm)
        for codec in [TopK(0.1, momentum=0.9), Threshold(1.0, clip_norm=1.0)]:
            refused(UsageError, "ErrorFeedback", codec.attach, np.zeros(4, F32), comm)

    on_ranks(1, body)


@pytest.mark.parametrize(
    "codec",
    [Fp32(), Fp16("dynamic"), codecs.BFloat16(), TopK(0.1, momentum=0.9), ErrorFeedback(Threshold(0.5))],
    ids=repr,
)
def test_codecs_are_values(codec):
    assert pickle.loads(pickle.dumps(codec)) == codec
    assert hash(codec) == hash(pickle.loads(pickle.dumps(codec)))


def test_names():
    assert create("top-k", ratio=0.02, error_feedback=True) == ErrorFeedback(TopK(0.02))
    assert create("threshold", bound=0.02) == Threshold(0.02)
    assert create("quantized", bits=4, error_feedback=True, decay=0.9) == ErrorFeedback(Quantized(4), decay=0.9)
    assert create("fp16", scale="dynamic") == Fp16("dynamic")
    refused(UsageError, ", ".join(codecs.CODECS), create, "fp64")
    said = r"codec 'fp16' takes no ratio=; it takes scale=, see distopt.codecs.Fp16"
    refused(UsageError, said, create, "fp16", ratio=0.5)
    refused(UsageError, r"'fp32' .*leave error_feedback= out", create, "fp32", error_feedback=True)
    assert codec_of("plain") == codec_of("fp32") == Fp32()
    assert codec_of("half", 7.0) == codec_of("fp16") == Fp16()
    assert codec_of("sparseTopK", 0.02) == ErrorFeedback(TopK(0.02))
    assert codec_of("sparseThreshold", 0.02, corr=False) == Threshold(0.02)
    for name in DIST_OPTIONS:
        if name != "partialUpdate":
            codec_of(name)
    refused(UsageError, "plain, fp32, half, fp16, bf16, partialUpdate, sparseTopK, sparseThreshold", codec_of, "fp64")


@pytest.mark.parametrize("name", codecs.CODECS)
def test_an_option_that_is_missing_is_named(name):
    """As the argument to add to the call: of fronts that take options, and of those that take a codec alone."""
    needed = {"top-k": "ratio= or k=", "threshold": "bound="}.get(name)
    if needed is None:
        assert isinstance(create(name), codecs.CODECS[name])
        assert codecs.codec_of(name) == create(name)
        return
    option = needed.partition("=")[0]
    for options in ({}, {"error_feedback": True}):
        refused(UsageError, rf"needs {needed}: add {option}=0.01, .* after '{name}'", create, name, **options)
    said = refused(UsageError, rf"needs {needed}, .* codec=distopt.codecs.(.*)$", codecs.codec_of, name)
    assert eval(str(said).rpartition("codecs.")[2], {"create": create}) == create(name, **{option: 0.01})


def test_decay_fades_the_residual():
    def body(comm):
        codec = ErrorFeedback(TopK(k=1), decay=0.5)
        bucket = comm.empty(3)
        state = codec.attach(bucket, comm)
        means = []
        for gradient in ([8, 2, 1 + comm.topology.rank], [0, 0, 0], [0, 0, 0]):
            bucket[:] = gradient
            assert codecs.finish_all([codecs.PendingReduction(codec, state)]) == [None]
            means.append(bucket.tolist())
        return means, state.residual.tolist()

    (means, left), (_, other) = on_ranks(2, body)
    # After a step, half of what was not sent is left; rank 1 sends the lower index of its two equal elements first.
    assert means == [[8, 0, 0], [0, 1, 0], [0, 0, 0.375]]
    assert (left, other) == ([0, 0, 0], [0, 0, 0])
