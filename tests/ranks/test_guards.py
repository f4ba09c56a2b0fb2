"""What is wrong with gradients and arguments is named, by parameter, step and rank; types, sizes and clipping."""

import contextlib
from functools import partial

import numpy as np
import pytest

from distopt import device, opt, singa_wrap, tensor
from distopt.codecs import ErrorFeedback, Fp32, TopK
from distopt.errors import GradientError, UsageError
from distopt.nn.core import autograd
from tests.ranks.small_net import Net, assert_equal_bits, batch, beside, build, on_ranks, parameters, step_of, train
from tests.unit.refusals import refused

pytestmark = pytest.mark.slow(kept=1)  # seconds a case


def poisoned(optimizer, net: Net, number: int, strategy, bad: float) -> None:
    """A step in which one element of one gradient of the last rank is `bad`."""

    def step(loss):
        backward = autograd.backward

        def spoiled(loss, **options):
            for param, grad in backward(loss, **options):
                if param.name == "linear1.b" and optimizer.global_rank == optimizer.world_size - 1:
                    grad.array[7] = bad
                yield param, grad

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(autograd, "backward", spoiled)
            step_of(optimizer, strategy)(loss)

    net(*batch(number, optimizer.global_rank), step)


def forgetting(optimizer, forgets: bool) -> dict[str, np.ndarray]:
    net = build(optimizer)
    for number in range(4):
        if forgets and number > 1:
            for param in net.get_params().values():
                param.grad = None
        train(optimizer, net, range(number, number + 1), Fp32())
    return {"parameters": parameters(net)}


@pytest.mark.slow
def test_a_gradient_that_a_script_has_set_to_none_is_averaged_all_the_same():
    assert_equal_bits([*on_ranks(2, forgetting, False), *on_ranks(2, forgetting, True)])


def without_bad_steps(optimizer, raises: bool) -> None:
    strategies = {"fp32": Fp32(), "top-K": ErrorFeedback(TopK(0.1)), "partial": "partialUpdate"}
    last = optimizer.world_size - 1
    where = rf"step \d: the gradient of linear1.b is NaN, infinite or too large for a sum on rank {last} \("
    for name, strategy in strategies.items():
        found = []
        for bad_steps in ((1, 4, 5), ()):
            optimizer = beside(optimizer)
            optimizer.non_finite = "raise" if raises else "skip"
            net = build(optimizer)
            for number in range(8):
                with optimizer.no_sync() if number == 2 else contextlib.nullcontext():
                    if number not in (1, 4, 5):
                        train(optimizer, net, range(number, number + 1), strategy)
                    elif number in bad_steps:
                        before = parameters(net)
                        refused = pytest.raises(GradientError, match=where) if raises else contextlib.nullcontext()
                        with refused as caught:
                            poisoned(optimizer, net, number, strategy, np.inf if name == "fp32" else np.nan)
                        assert not raises or caught.value.rank == last
                        np.testing.assert_array_equal(parameters(net), before)
            states = optimizer.get_states()
            assert states.pop("steps")[2:].tolist() == [4 * (name == "partial"), *2 * [name == "partial"]]
            found.append({"": parameters(net), **states})
        assert found[0].keys() == found[1].keys()
        for key, array in found[0].items():
            np.testing.assert_array_equal(array, found[1][key], err_msg=f"{name} {key}")


@pytest.mark.parametrize(("world_size", "raises"), [(2, True), (3, False)])
def test_after_a_bad_step_training_goes_on_as_if_it_had_not_been(world_size, raises):
    on_ranks(world_size, without_bad_steps, raises)


def ignoring(optimizer) -> None:
    optimizer = beside(optimizer, non_finite="ignore")
    net = build(optimizer)
    poisoned(optimizer, net, 0, Fp32(), np.nan)
    assert np.isnan(parameters(net)).any()


@pytest.mark.slow
def test_fp32_does_not_look_where_nan_is_ignored():
    on_ranks(2, ignoring)


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setenv("DISTOPT_TRANSPORT", "single")
    return lambda **options: opt.DistOpt(opt.SGD(lr=0.05), singa_wrap.NcclIdHolder(), 0, 1, **options)


def test_bad_arguments_are_named(alone):
    optimizer = alone()
    net = build(optimizer)
    x, y = batch(0, 0)
    sparse, half = optimizer.backward_and_sparse_update, optimizer.backward_and_update_half
    for match, step, options in (
        (r"ratio of top-K is 0.0; .* in \(0, 1\]", sparse, {"spars": 0.0, "topK": True}),
        (r"ratio of top-K is 1.5; .* in \(0, 1\]", partial(optimizer.step_by, "sparseTopK"), {"spars": 1.5}),
        ("threshold is -0.1;", sparse, {"spars": -0.1}),
        ("unknown dist_option 'fp8'; choose one of plain, fp32,", partial(optimizer.step_by, "fp8"), {}),
        (r"\(clip\) is -1;", half, {"clipping": True, "clip_Value": -1}),
        ("elements is -5; it must be an integer of at least 0", optimizer.backward_and_update, {"threshold": -5}),
    ):
        refused(UsageError, match, net, x, y, partial(step, **options))
    net(x, y, optimizer)
    refused(UsageError, "='stop' is not one of raise, skip, ignore", setattr, optimizer, "non_finite", "stop")
    for match, options in (
        ("non_finite='stop' is not one of raise, skip, ignore", {"non_finite": "stop"}),
        ("unknown codec 'fp8'; choose one of", {"codec": "fp8"}),
        ("fusion buffer in elements is 0; it must be an integer", {"buffSize": 0}),
        ("fusion buffer in elements is 'a'; it must be an integer", {"buffSize": "a"}),
    ):
        refused(UsageError, match, alone, **options)


# -- types and sizes --------------------------------------------------------------------------------------------------
def test_float64_parameters_train_in_float64_and_lossy_codecs_refuse_them(alone):
    x, y = batch(0, 0)
    wide = tensor.Tensor.of(x.array.astype(np.float64))
    optimizer = alone()
    device.get_default_device().SetRandSeed(3)
    net = Net()
    net.set_optimizer(optimizer)
    net.compile([wide], is_train=True)
    assert parameters(net).dtype == np.float64
    first = net(wide, y, optimizer).item()
    for _ in range(20):
        last = net(wide, y, optimizer).item()
    assert last < first
    text = r"bucket 0: linear2.W of float64 cannot be reduced by Fp16, which takes float32"
    refused(UsageError, text, net, wide, y, optimizer.backward_and_update_half)
