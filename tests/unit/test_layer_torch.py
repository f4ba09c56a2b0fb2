"""Every layer against PyTorch, in float32 and float64: outputs, parameter gradients and input gradients."""

import copy

import numpy as np
import pytest

from distopt import autograd, layer
from distopt.nn.core.tensor import Tensor

torch = pytest.importorskip("torch", reason="PyTorch is the oracle of these tests; pip install torch==2.13.0")
nn = torch.nn
chain = nn.Sequential

pytestmark = pytest.mark.usefixtures("training")


def conv_relu(*args, **kwargs):
    return chain(nn.Conv2d(*args, **kwargs), nn.ReLU())


def framed(border, *modules):
    """`modules` on images with a border, which is no maximum, or zeros: left, right, top, bottom."""
    fill = -np.inf if isinstance(modules[0], nn.MaxPool2d) else 0.0
    return chain(nn.ConstantPad2d(border, fill), *modules)


IMAGES = (4, 3, 9, 8)
# Our layer, that of PyTorch, and the shape of the input if it is another one.
CASES = {
    "conv": (layer.Conv2d(5, 3), nn.Conv2d(3, 5, 3)),
    "conv in channels": (layer.Conv2d(3, 5, (2, 3), 2, 1), nn.Conv2d(3, 5, (2, 3), 2, 1)),
    "conv relu": (layer.Conv2d(3, 5, 3, padding=(1, 0), activation="RELU"), conv_relu(3, 5, 3, padding=(1, 0))),
    "conv no bias": (layer.Conv2d(5, 1, stride=(2, 3), bias=False), nn.Conv2d(3, 5, 1, (2, 3), bias=False)),
    "conv relu max pool": (
        layer.Conv2d(3, 5, 3, activation="RELU", pool=layer.MaxPool2d(2)),
        chain(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.MaxPool2d(2)),
    ),
    "conv max pool overlapping": (
        layer.Conv2d(5, (2, 3), stride=(1, 2), padding=1, bias=False, pool=layer.MaxPool2d(3, 2, 1)),
        chain(nn.Conv2d(3, 5, (2, 3), (1, 2), 1, bias=False), nn.MaxPool2d(3, 2, 1)),
    ),
    "conv groups": (layer.Conv2d(4, 6, (3, 2), 2, 1, group=2), nn.Conv2d(4, 6, (3, 2), 2, 1, groups=2), (4, 4, 9, 8)),
    "conv groups uneven padding": (
        layer.Conv2d(4, 2, group=2, bias=False, padding=(0, 1, 2, 1)),
        framed((2, 1, 0, 1), nn.Conv2d(6, 4, 2, groups=2, bias=False)),
        (2, 6, 5, 5),
    ),
    "conv depthwise": (
        layer.Conv2d(3, (3, 2), padding=(1, 0), stride=(2, 1), group=3, activation="RELU"),
        conv_relu(3, 3, (3, 2), (2, 1), (1, 0), groups=3),
    ),
    "conv depthwise multiplier": (layer.Conv2d(6, 3, group=3), nn.Conv2d(3, 6, 3, groups=3)),
    "conv uneven padding": (layer.Conv2d(3, 5, (4, 3), 1, (1, 2, 0, 1)), framed((0, 1, 1, 2), nn.Conv2d(3, 5, (4, 3)))),
    "conv even padding of four": (layer.Conv2d(5, 3, padding=[1, 1, 2, 2]), nn.Conv2d(3, 5, 3, 1, (1, 2))),
    "conv same upper": (
        layer.Conv2d(5, (4, 3), stride=(2, 1), pad_mode="SAME_UPPER", padding=None),
        framed((1, 1, 1, 2), nn.Conv2d(3, 5, (4, 3), (2, 1))),
    ),
    "conv same lower": (
        layer.Conv2d(5, (4, 3), stride=(2, 1), pad_mode="SAME_LOWER"),
        framed((1, 1, 2, 1), nn.Conv2d(3, 5, (4, 3), (2, 1))),
    ),
    "conv same, even": (layer.Conv2d(5, 3, pad_mode="SAME_LOWER"), nn.Conv2d(3, 5, 3, padding=1)),
    "conv same, stride beyond the kernel": (layer.Conv2d(5, 1, stride=3, pad_mode="SAME_UPPER"), nn.Conv2d(3, 5, 1, 3)),
    "conv same relu max pool": (
        layer.Conv2d(5, 2, activation="RELU", pad_mode="SAME_UPPER", pool=layer.MaxPool2d(2)),
        framed((0, 1, 0, 1), nn.Conv2d(3, 5, 2), nn.ReLU(), nn.MaxPool2d(2)),
    ),
    "separable": (
        layer.SeparableConv2d(3, 6, 3, 2, 1),
        chain(nn.Conv2d(3, 3, 3, 2, 1, groups=3, bias=False), nn.Conv2d(3, 6, 1, bias=False)),
    ),
    "separable bias": (layer.SeparableConv2d(6, 3, bias=True), chain(nn.Conv2d(3, 3, 3, groups=3), nn.Conv2d(3, 6, 1))),
    "linear": (layer.Linear(7), nn.Linear(5, 7), (4, 5)),
    "linear in features": (layer.Linear(5, 7, bias=False), nn.Linear(5, 7, bias=False), (4, 5)),
    "linear relu": (layer.Linear(7, activation="RELU"), chain(nn.Linear(5, 7), nn.ReLU()), (4, 5)),
    "max pool": (layer.MaxPool2d(2, 2), nn.MaxPool2d(2, 2)),
    "max pool overlapping": (layer.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 2, 1)),
    "max pool default stride": (layer.MaxPool2d((3, 2)), nn.MaxPool2d((3, 2))),
    "avg pool": (layer.AvgPool2d(2), nn.AvgPool2d(2)),
    "avg pool padding": (layer.AvgPool2d(3, 2, padding=1), nn.AvgPool2d(3, 2, 1)),
    "avg pool uneven padding": (layer.AvgPool2d(3, 2, padding=(1, 0, 0, 1)), framed((0, 1, 1, 0), nn.AvgPool2d(3, 2))),
    "avg pool same": (layer.AvgPool2d(4, 1, pad_mode="SAME_LOWER"), framed((2, 1, 2, 1), nn.AvgPool2d(4, 1))),
    "max pool uneven padding": (
        layer.MaxPool2d((2, 3), 2, (0, 1, 1, 0)),
        framed((1, 0, 0, 1), nn.MaxPool2d((2, 3), 2)),
    ),
    "max pool same upper": (layer.MaxPool2d(2, 1, pad_mode="SAME_UPPER"), framed((0, 1, 0, 1), nn.MaxPool2d(2, 1))),
    "max pool same lower": (layer.MaxPool2d(3, 2, pad_mode="SAME_LOWER"), framed((1, 0, 1, 1), nn.MaxPool2d(3, 2))),
    "pooling max": (layer.Pooling2d(2), nn.MaxPool2d(2)),
    "pooling mean": (layer.Pooling2d((2, 3), is_max=False), nn.AvgPool2d((2, 3))),
    "max pool 1d": (layer.MaxPool1d(3, 2, 1), nn.MaxPool2d((1, 3), (1, 2), (0, 1)), (4, 3, 1, 9)),
    "avg pool 1d": (layer.AvgPool1d(2), nn.AvgPool2d((1, 2)), (4, 3, 1, 9)),
    "avg pool 1d same": (
        layer.AvgPool1d(4, 1, pad_mode="SAME_UPPER"),
        framed((1, 2, 0, 0), nn.AvgPool2d((1, 4), 1)),
        (4, 3, 1, 9),
    ),
    "batch norm": (layer.BatchNorm2d(), nn.BatchNorm2d(3)),
    "batch norm of few": (layer.BatchNorm2d(), nn.BatchNorm2d(3), (4, 3, 2, 2)),
    "batch norm relu": (layer.BatchNorm2d(activation="RELU"), chain(nn.BatchNorm2d(3), nn.ReLU())),
    "batch norm momentum": (layer.BatchNorm2d(3, momentum=0.6), nn.BatchNorm2d(3, momentum=0.4)),
    "relu": (layer.ReLU(), nn.ReLU()),
    "sigmoid": (layer.Sigmoid(), nn.Sigmoid()),
    "softmax": (layer.SoftMax(), nn.Softmax(-1), (6, 5)),
    "flatten": (layer.Flatten(), nn.Flatten()),
}


def to_ours(value):
    """PyTorch keeps [out, in] in linear layers."""
    return np.ascontiguousarray(value.T) if value.ndim == 2 else value


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CASES)
def test_layer_equals_pytorch(name, dtype):
    ours, theirs, *other = CASES[name]
    (shape,) = other or [IMAGES]
    ours, theirs = copy.deepcopy(ours), copy.deepcopy(theirs).to(getattr(torch, np.dtype(dtype).name))
    tolerance = {"rtol": 1e-4, "atol": 2e-5} if dtype == np.float32 else {"rtol": 1e-10, "atol": 1e-12}
    for step in range(3):
        rng = np.random.default_rng(step)
        values = rng.standard_normal(shape).astype(dtype)
        x = Tensor(data=values, stores_grad=True, name="x", dtype=values.dtype)
        their_x = torch.from_numpy(values.copy()).requires_grad_()
        if not step:
            ours(Tensor.of(values))  # makes the parameters
            if name.startswith("batch norm"):
                ours.running_mean.set_value(0)
                ours.running_var.set_value(1)
            theirs_by_name = dict(zip(ours.get_params(), theirs.parameters(), strict=True))
            ours.set_params({k: to_ours(p.detach().numpy()) for k, p in theirs_by_name.items()})
        y, their_y = ours(x), theirs(their_x)
        np.testing.assert_allclose(y.array, their_y.detach().numpy(), **tolerance)
        dy = rng.standard_normal(y.shape).astype(dtype)
        gradients = dict(autograd.backward(y, Tensor.of(dy)))
        theirs.zero_grad()
        their_y.backward(torch.from_numpy(dy))
        np.testing.assert_allclose(gradients.pop(x).data, their_x.grad.numpy(), **tolerance)
        for key, param in ours.get_params().items():
            expected = to_ours(theirs_by_name[key].grad.numpy())
            np.testing.assert_allclose(gradients.pop(param).data, expected, **tolerance)
        assert not gradients
    if name.startswith("batch norm"):
        for key, their_value in theirs.named_buffers():
            if "running" in key:
                got = getattr(ours, key.rpartition(".")[2]).array
                np.testing.assert_allclose(got, their_value.numpy(), rtol=1e-5, atol=1e-6)
        autograd.training = False
        their_y = theirs.eval()(torch.from_numpy(values))
        np.testing.assert_allclose(ours(Tensor.of(values)).array, their_y.detach().numpy(), rtol=1e-4, atol=1e-6)
