"""Sums by hand, as SINGA's scripts make them, and such a script."""

import sys
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from distopt import opt, tensor
from distopt.errors import GradientError, UsageError
from tests.processes import Program
from tests.ranks.small_net import SMALL, assert_equal_bits, batch, beside, build, by_hand, on_ranks, parameters
from tests.unit.refusals import refused
from tests.users_rules import ByApply, ByHook, WithStates, built_in

# Arguments that the methods take in place of a tensor; all of them share its memory.
FORMS = {
    "tensor": lambda t: t,
    "raw": lambda t: t.data,
    "array": lambda t: t.array,
    "view": lambda t: t.array.reshape(-1).reshape(t.shape),
}


def sums(optimizer) -> None:
    rank, world_size, device = optimizer.global_rank, optimizer.world_size, optimizer.device
    rng = np.random.default_rng(rank)
    own = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (5,), (70,), (2, 2))]
    everyone = [np.random.default_rng(r) for r in range(world_size)]
    all_own = [[g.standard_normal(a.shape).astype(np.float32) for a in own] for g in everyone]
    sums = [np.sum([arrays[i] for arrays in all_own], axis=0) for i in range(len(own))]
    small = opt.DistOpt(opt.SGD(), communicator=optimizer.communicator, buffSize=20)
    for face in (optimizer, small):
        for form, of in FORMS.items():  # buffers are used again
            tensors = [tensor.from_numpy(array, device) for array in own]
            face.all_reduce(of(tensors[0]))
            face.all_reduce_half(of(tensors[1]))
            face.fused_all_reduce_half([of(tensors[2])], send=False)
            face.fused_all_reduce_half([of(tensors[2]), tensors[3]], send=True)
            face.wait()
            for i, (t, expected) in enumerate(zip(tensors, sums, strict=True)):
                np.testing.assert_allclose(t.to_numpy(), expected, atol=1e-6 if i == 0 else 2e-2, err_msg=f"{form} {i}")
            tensors = [tensor.from_numpy(array, device) for array in own]
            face.fused_all_reduce(tuple(map(of, tensors)), send=False)
            face.fused_all_reduce([make(t) for make, t in zip(FORMS.values(), tensors, strict=True)])
            face.wait()
            for t, expected in zip(tensors, sums, strict=True):
                np.testing.assert_allclose(t.to_numpy(), expected, rtol=1e-5, atol=1e-6)

    sent = np.zeros(70)
    residual = tensor.Tensor((70,), device)
    for step, of in enumerate(FORMS.values()):
        t = tensor.from_numpy(own[2], device)
        optimizer.sparsification(of(t), of(residual), 0.03 * (step + 1), True)
        optimizer.wait()
        assert 0 < np.count_nonzero(t.to_numpy()) <= 9 * world_size
        sent += t.to_numpy()
    optimizer.all_reduce(residual)
    optimizer.wait()
    np.testing.assert_allclose(sent + residual.to_numpy(), 4 * sums[2], rtol=1e-4, atol=1e-5)

    pair = [tensor.from_numpy(array, device) for array in own[1:3]]
    residual = tensor.Tensor((75,), device)
    optimizer.fused_sparsification([pair[0].data, pair[1]], residual.array.reshape(5, 15), 1.4, topK=False)
    optimizer.wait()
    kept = [np.sum([np.where(np.abs(a[i]) >= 1.4, a[i], 0) for a in all_own], axis=0) for i in (1, 2)]
    for t, expected in zip(pair, kept, strict=True):
        np.testing.assert_allclose(t.to_numpy(), expected, rtol=1e-5, atol=1e-6)
    flat = np.concatenate([own[1], own[2]])
    np.testing.assert_array_equal(residual.to_numpy(), np.where(np.abs(flat) < 1.4, flat, 0))

    one = tensor.from_numpy(own[2], device)
    optimizer.sparsification(one, None, 1.4)
    optimizer.wait()
    np.testing.assert_allclose(one.to_numpy(), kept[1], rtol=1e-5, atol=1e-6)
    bad = tensor.from_numpy(np.full(5, np.nan if rank == world_size - 1 else 1.0, np.float32), device)
    optimizer.fused_all_reduce([bad])
    with pytest.raises(GradientError, match=f"on rank {world_size - 1}"):
        optimizer.wait()


def wide_sums(optimizer) -> None:
    """Other types than float32 keep theirs."""
    total = sum(range(1, optimizer.world_size + 1))
    for dtype in (np.float64, np.int32, np.int64):
        array = np.arange(7, dtype=dtype) * (optimizer.global_rank + 1)
        optimizer.all_reduce(array)
        optimizer.wait()
        np.testing.assert_array_equal(array, np.arange(7, dtype=dtype) * total, strict=True)
    pair = np.arange(3.0) / 3 * (optimizer.global_rank + 1), np.ones((2, 2), np.float32)
    optimizer.fused_all_reduce(list(pair))
    optimizer.wait()
    np.testing.assert_allclose(pair[0], np.arange(3.0) / 3 * total, rtol=1e-15)
    np.testing.assert_array_equal(pair[1], np.full((2, 2), optimizer.world_size, np.float32), strict=True)


def updates(optimizer) -> None:
    """A sum becomes a mean in place; parameters are tensors or their memory, gradients anything."""
    for make in (lambda: opt.SGD(0.25, momentum=0.5), opt.Adam):
        expected = tensor.from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3), optimizer.device)
        params = {form: expected.clone() for form in FORMS}
        face, reference = beside(optimizer, make()), make()
        for turn in range(3):
            slope = np.sin(np.arange(6, dtype=np.float32) + turn).reshape(2, 3)
            reference.update(expected, tensor.from_numpy(slope, optimizer.device))
            forms = zip(FORMS.items(), [*list(FORMS.values())[turn:], *FORMS.values()], strict=False)
            for (form, of), of_grad in forms:
                grad = tensor.from_numpy(slope * face.world_size, optimizer.device)
                face.update(of(params[form]), of_grad(grad))
                np.testing.assert_allclose(grad.to_numpy(), slope, rtol=1e-6)
            reference.step()
            face.opt.step()
        for form, param in params.items():
            np.testing.assert_allclose(param.to_numpy(), expected.to_numpy(), rtol=1e-5, atol=1e-6, err_msg=form)


def bad_arguments(optimizer) -> None:
    """A bad argument is named in one line, before anything is staged, sent or changed."""
    good, wide, strided = np.ones(4, np.float32), np.ones(4), np.ones(8, np.float32)[::2]
    fixed = np.ones(4, np.float32)
    fixed.flags.writeable = False
    param = tensor.from_numpy(good)
    takes_float64 = [optimizer.all_reduce, lambda bad: optimizer.fused_all_reduce([good, bad], send=False)]
    float32_alone = [
        optimizer.all_reduce_half,
        lambda bad: optimizer.fused_all_reduce_half([good, bad]),
        lambda bad: optimizer.sparsification(bad, None, 0.5, False),
        lambda bad: optimizer.fused_sparsification([good, bad], None, 0.5, True),
        lambda bad: optimizer.sparsification(good, bad, 0.5, False),
        lambda bad: optimizer.update(param, bad),
        lambda bad: optimizer.update(bad, good),
    ]
    cases = [
        (3, "an object of type int cannot be sent; pass an array"),
        ([1.0, 2.0], "an object of type list cannot be sent; pass an array"),
        (strided, "a strided array cannot be sent"),
        (fixed, "a read-only array cannot receive the result"),
        (good.astype(">f4"), "a big-endian array cannot be sent"),
        (good.astype(np.complex64), "arrays of complex64 cannot be sent"),
    ]
    for calls, arguments in ((takes_float64, cases), (float32_alone, [*cases, (wide, "float64")])):
        for call, (bad, message) in product(calls, arguments):
            refused(UsageError, message, call, bad)
    for call in (optimizer.fused_all_reduce, optimizer.fused_all_reduce_half, optimizer.fused_sparsification):
        for bad in (param, good, 3, None):
            text = f"a list of tensors or arrays, not an object of type {type(bad).__name__}"
            refused(UsageError, text, call, bad)
    refused(UsageError, "nothing to send; pass one tensor", optimizer.fused_sparsification, [])
    text = "a residual of 1 float32 does not fit 4 float32"
    refused(UsageError, text, optimizer.sparsification, good, tensor.Tensor((1,)), topK=True)
    text = r"gradient of float32 and shape \(2, 2\) is none of a parameter of float32"
    refused(UsageError, text, optimizer.update, param, good.reshape(2, 2))
    optimizer.wait()
    for array in (good, param.array, wide):
        np.testing.assert_array_equal(array, np.ones(4))
    optimizer.fused_all_reduce([good])
    optimizer.wait()
    np.testing.assert_array_equal(good, np.full(4, optimizer.world_size))


def every_body(optimizer) -> None:
    for body in (sums, wide_sums, updates, bad_arguments):
        body(optimizer)


@pytest.mark.slow
def test_sums_by_hand():
    on_ranks(3, every_body)


def test_singa_s_script_runs_with_its_imports_changed():
    script = str(Path(__file__).with_name("singa_script.py"))
    ended = Program([sys.executable, script], {"OPENBLAS_NUM_THREADS": "1"}).end()
    assert sorted(ended.stdout.splitlines()) == [f"rank {r} of 2 sum 3.0 True" for r in range(2)], ended.stderr


# -- users' optimizers: equal bits on all ranks, and those of the rule that is built in ----------------------------
STEPS = 4
OPTIONS = ("plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold")


def schedule() -> opt.DecayScheduler:
    return opt.ExponentialDecay(0.05, 2, 0.5)


def trained(optimizer, rule, options) -> np.ndarray:
    """The parameters after some steps of each of the options in turn."""
    optimizer = beside(optimizer, rule, partition_elements=SMALL)
    net = build(optimizer)
    for number, option in enumerate(np.repeat(options, STEPS)):
        x, y = batch(number, optimizer.global_rank)
        net(x, y, lambda loss, option=str(option): optimizer.step_by(option, loss, spars=0.1))
    optimizer.synchronize()
    assert rule.step_counter.item() == STEPS * len(options)
    return parameters(net)


def looped(optimizer, rule) -> np.ndarray:
    """By SINGA's loop over raw gradients."""
    optimizer = beside(optimizer, rule)
    net = build(optimizer)
    for number in range(STEPS):
        net(*batch(number, optimizer.global_rank), partial(by_hand, optimizer))
    return parameters(net)


def every_rule(optimizer, makes) -> dict[str, np.ndarray]:
    results = {}
    for make in makes:
        for options in [*((option,) for option in OPTIONS), OPTIONS]:
            if make is ByApply and options is OPTIONS:
                continue  # its private state cannot be averaged after partial updates
            results[f"{make.__name__} {options}"] = trained(optimizer, make(schedule()), options)
        results[f"{make.__name__} by hand"] = looped(optimizer, make(schedule()))
    return results


def test_users_rules_give_the_bits_of_the_built_in_one_on_all_ranks():
    ranks = on_ranks(2, every_rule, (ByApply, WithStates, ByHook, built_in))
    assert_equal_bits(ranks)
    for key, own in ranks[0].items():
        how = key.split(" ", 1)[1]
        np.testing.assert_array_equal(own, ranks[0][f"built_in {how}"], err_msg=key)
        assert np.isfinite(own).all()
