"""Layers: names, parameters, lazy shapes and what they refuse."""

import re
from collections import OrderedDict

import numpy as np
import pytest

from distopt import autograd, device, initializer, layer
from distopt.errors import ShapeError, StateError, UsageError
from distopt.nn.core.tensor import Tensor
from tests.unit.nets import Chain, copies
from tests.unit.refusals import refused

SHAPES = {  # fan_in, fan_out
    (200, 300): (200, 300),
    (70, 50, 8): (400, 560),
    (80, 40, 5, 3): (600, 1200),
    (20, 5, 4, 3, 7): (420, 1680),
    (40000,): (200, 200),
    (4, 3, 5, 2, 6, 50): (np.sqrt(36000), np.sqrt(36000)),
}
OF_FANS = {
    "he": lambda fan_in, fan_out: np.sqrt(2 / fan_in),
    "lecun": lambda fan_in, fan_out: np.sqrt(1 / fan_in),
    "glorot": lambda fan_in, fan_out: np.sqrt(2 / (fan_in + fan_out)),
}


class Block(layer.Layer):
    def __init__(self):
        self.conv = layer.Conv2d(4, 3, padding=1)
        self.norm = layer.BatchNorm2d()
        self.branches = [layer.Conv2d(4, 1, bias=False), layer.Conv2d(4, 1)]
        self.shared = self.conv

    def forward(self, x):
        y = self.norm(self.conv(x))
        return layer.Add()(self.branches[0](y), self.branches[1](y))


def images(*shape, dtype=np.float32):
    return Tensor.of(np.random.default_rng(0).standard_normal(shape).astype(dtype))


def test_parameters_are_found_among_attributes_each_once():
    block = Block()
    assert block.get_params() == {}
    block(images(2, 3, 5, 5))
    shapes = {"conv.W": (4, 3, 3, 3), "conv.b": (4,), "norm.scale": (4,), "norm.bias": (4,)}
    shapes |= {"branches.0.W": (4, 4, 1, 1), "branches.1.W": (4, 4, 1, 1), "branches.1.b": (4,)}
    assert {name: p.shape for name, p in block.get_params().items()} == shapes
    assert all(p.stores_grad for p in block.get_params().values())
    assert list(block.get_states()) == [*shapes, "norm.running_mean", "norm.running_var"]
    memory = block.conv.W.array
    block(images(1, 3, 7, 4))
    assert block.conv.W.array is memory


def test_a_parameter_shared_by_two_layers_is_one():
    class Tied(layer.Layer):
        def __init__(self):
            self.first, self.second = layer.Linear(4), layer.Linear(4)

        def forward(self, x):
            y = self.first(x)
            self.second(y)
            self.second.W = self.first.W
            return self.second(y)

    net = Tied()
    net(images(3, 4))
    assert list(net.get_params()) == ["first.W", "first.b", "second.b"]


def test_values_can_be_set_all_or_none():
    target = Block()
    target(images(2, 3, 5, 5))
    before = copies(target.get_params())
    arrays = {name: array + 1 for name, array in before.items()}
    for wrong, message in [
        ({**arrays, "conv.b": np.zeros(5, np.float32)}, r"conv.b is float32 of shape \(4,\), that of the states"),
        ({**arrays, "conv.b": np.zeros(4)}, "that of the states float64"),
        ({**arrays, "x": np.zeros(1)}, "the model has no x"),
        ({k: v for k, v in arrays.items() if k != "norm.bias"}, "norm.bias is missing"),
    ]:
        refused(StateError, message, target.set_params, wrong)
        np.testing.assert_equal(copies(target.get_params()), before)
    target.set_params(arrays)
    np.testing.assert_equal(copies(target.get_params()), arrays)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_initial_parameters_come_from_the_seed_and_the_input_type(dtype):
    values = []
    for _ in range(2):
        device.get_default_device().SetRandSeed(11)
        net = layer.Conv2d(40, 5)
        net(images(1, 20, 8, 8, dtype=dtype))
        values.append(net.W.to_numpy())
        assert net.W.dtype == net.b.dtype == dtype
    np.testing.assert_array_equal(*values)
    assert values[0].std() == pytest.approx(np.sqrt(2 / (500 + 40)), rel=0.02)
    assert not net.b.array.any()
    linear = layer.Linear(300)
    linear(images(1, 200))
    assert linear.W.array.std() == pytest.approx(np.sqrt(2 / 500), rel=0.02)


def test_small_layers():
    a, b = images(2, 3), images(2, 4)
    np.testing.assert_array_equal(layer.Cat(1)([a, b]).data, np.concatenate([a.array, b.array], 1))
    np.testing.assert_array_equal(layer.Reshape()(a, (3, -1)).data, a.array.reshape(3, 2))
    np.testing.assert_array_equal(layer.Add()(a, a).data, 2 * a.array)
    assert layer.Flatten(axis=2)(images(2, 3, 4)).shape == (6, 4)
    assert layer.Flatten()(images(0, 3, 4)).shape == (0, 12)
    x = autograd.sigmoid(images(4, 3))
    t = Tensor.of(x.array[::-1].copy())
    assert layer.CrossEntropy()(x, t).item() == autograd.cross_entropy(x, t).item()
    assert layer.BinaryCrossEntropy()(x, t).item() == autograd.binary_cross_entropy(x, t).item()
    linear = layer.Linear(3, 2, False)
    linear(images(1, 3))
    assert (list(linear.get_params()), linear.b) == (["W"], None)
    refused(NotImplementedError, "Layer has no forward", lambda: layer.Layer()(1))


@pytest.mark.parametrize(
    ("make", "shape", "message"),
    [
        (lambda: layer.Linear(800, 10), (2, 801), "item expects 800 inputs, got 801"),
        (lambda: layer.Linear(10), (2, 3, 4), "item expects rows [N, inputs], got [2, 3, 4]; put a Flatten before it"),
        (lambda: layer.Conv2d(3, 8, 3), (2, 4, 5, 5), "item expects images [N, 3, H, W], got [2, 4, 5, 5]"),
        (lambda: layer.Conv2d(8, 3), (2, 4), "item expects images [N, C, H, W], got [2, 4]"),
        (lambda: layer.Conv2d(8, 6), (2, 4, 5, 5), "item: a kernel of"),
        (lambda: layer.Conv2d(4, 6, group=4), (2, 4, 5, 5), "item: a kernel of"),
        (lambda: layer.Conv2d(4, 8, group=2, padding=(0, 1, 1, 1)), (2, 4, 5, 5), "padding (0, 1, 1, 1) does not fit"),
        (lambda: layer.Conv2d(6, 3, group=3), (2, 4, 5, 5), "item: 4 channels cannot be divided into 3 groups"),
        (lambda: layer.Conv2d(6, 3, pad_mode="SAME_LOWER"), (2, 4), "item expects images [N, C, H, W], got [2, 4]"),
        (lambda: layer.SeparableConv2d(3, 8, 3), (2, 4, 5, 5), "depthwise_conv expects images [N, 3, H, W], got"),
        (lambda: layer.BatchNorm2d(3), (2, 4, 5, 5), "item expects images [N, 3, H, W], got [2, 4, 5, 5]"),
        (lambda: layer.BatchNorm2d(), (2, 4), "item expects images [N, C, H, W], got [2, 4]"),
        (lambda: layer.MaxPool2d(7), (2, 4, 5, 5), "item: a kernel of"),
        (lambda: layer.AvgPool2d(2), (2, 4), "item: images have the shape"),
    ],
)
def test_shapes_that_do_not_fit_are_named_by_layer(make, shape, message):
    net = Chain(item=make())
    for _ in range(2):
        refused(UsageError, re.escape(message), lambda: net(images(*shape)))


def test_labels_of_one_hot_integers_and_types_that_do_not_fit():
    scores, classes = images(4, 3), np.array([2, 0, 1, 2], np.int32)
    loss = layer.SoftMaxCrossEntropy()(scores, Tensor.of(np.eye(3, dtype=np.int32)[classes]))
    assert loss.shape == (1,)  # as in SINGA: scripts print tensor.to_numpy(loss)[0]
    np.testing.assert_allclose(loss.array, layer.SoftMaxCrossEntropy()(scores, Tensor.of(classes)).array, rtol=1e-6)
    for make, shape in ((lambda: layer.Linear(3), (2, 3)), (lambda: layer.Conv2d(3, 1), (2, 3, 4, 4))):
        error = "item takes float16, float32 or float64, got uint8; convert"
        refused(UsageError, error, Chain(item=make()), Tensor(shape, dtype=np.uint8))
        net = Chain(item=make())
        net(images(*shape))
        error = "item has parameters of float32, got an input of float64"
        refused(UsageError, error, net, images(*shape, dtype=np.float64))
    error = r"adds an array of \[2, 4, 1, 1\] to images of \[2, 4, 5, 5\]"
    refused(ShapeError, error, layer.BatchNorm2d(), images(2, 4, 5, 5), images(2, 4, 1, 1))


@pytest.mark.parametrize("transA", [False, True])
@pytest.mark.parametrize("transB", [False, True])
@pytest.mark.parametrize("bias_shape", [None, (4, 1), False])
def test_gemm(transA, transB, bias_shape):
    gemm = layer.Gemm(5, 0.5, 3.0, transA, transB, bias=bias_shape is not False, bias_shape=bias_shape or None)
    a = images(*((3, 4) if transA else (4, 3)), dtype=np.float64)
    gemm(a)
    assert gemm.W.shape == ((5, 3) if transB else (3, 5))
    if bias_shape is not False:
        assert gemm.b.shape == (bias_shape or (1, 5))
        assert not gemm.b.array.any()
        gemm.b.gaussian(0.0, 1.0)
    y = gemm(a)
    left, right = (a.array.T if transA else a.array), (gemm.W.array.T if transB else gemm.W.array)
    expected = 0.5 * left @ right + (0 if bias_shape is False else 3.0 * gemm.b.array)
    np.testing.assert_allclose(y.array, expected, rtol=1e-12)
    wide = images(*((7, 4) if transA else (4, 7)), dtype=np.float64)
    refused(AssertionError, "Gemm expects 3 inputs, got 7", gemm, wide)  # what SINGA raises
    error = r"Gemm expects a matrix, got \[2, 3, 1\]; put a Flatten before it"
    refused(UsageError, error, gemm, images(2, 3, 1, dtype=np.float64))


class Residual(layer.Layer):
    """As SINGA's ResNet: the shortcut is a function, whose layers are its variables."""

    def __init__(self, channels, shortcut=None):
        super().__init__()
        self.conv = layer.Conv2d(channels, 3, padding=1, bias=False)
        self.shortcut = shortcut

    def forward(self, x):
        return autograd.relu(self.conv(x) + (x if self.shortcut is None else self.shortcut(x)))


class Tower(layer.Layer):
    def __init__(self, registered):
        super().__init__()
        self.first = layer.Conv2d(4, 3, bias=False)
        self.body, blocks = self.make_body()
        self.heads = {"small": layer.Linear(2, bias=False), "large": (layer.Linear(5, bias=False), [1, None])}
        gone = None
        self.without_value = lambda: gone  # noqa: F821
        del gone
        if registered:
            self.register_layers(*blocks)

    def make_body(self):
        conv, norm = layer.Conv2d(6, 1, bias=False), layer.BatchNorm2d(6)
        blocks = [Residual(6, lambda x: norm(conv(x))), Residual(6)]

        def body(x, times=1):
            for block in blocks:
                x = block(x)
            return body(x, times - 1) if times > 1 else x

        return body, blocks

    def forward(self, x):
        y = autograd.flatten(self.body(self.first(x)))
        return self.heads["small"](y), self.heads["large"][0](y)


@pytest.mark.parametrize("registered", [True, False])
def test_layers_in_functions_and_collections_are_found(registered):
    tower = Tower(registered)
    tower(images(2, 3, 5, 5))
    first, second = ("Residual_0", "Residual_1") if registered else ("body.blocks.0", "body.blocks.1")
    blocks = [f"{first}.conv.W", f"{first}.shortcut.conv.W"]
    blocks += [f"{first}.shortcut.norm.scale", f"{first}.shortcut.norm.bias", f"{second}.conv.W"]
    heads = ["heads.small.W", "heads.large.0.W"]
    assert list(tower.get_params()) == ["first.W", *(blocks + heads if registered else heads + blocks)]
    other = Tower(registered)
    other(images(2, 3, 5, 5))
    tower.get_states()[f"{first}.shortcut.norm.running_var"].set_value(7)
    other.set_states(copies(tower.get_states()))
    found, expected = ([y.array for y in net(images(2, 3, 5, 5))] for net in (other, tower))
    np.testing.assert_equal(found, expected)


def test_registered_layers_are_named_by_class_and_number():
    net, x = layer.Layer(), images(2, 4)
    layers = [layer.ReLU(), layer.Linear(3), layer.ReLU(), layer.Linear(2)]
    net.register_layers(*layers)
    for item in layers:
        x = item(x)
    assert list(net.get_params()) == ["Linear_1.W", "Linear_1.b", "Linear_3.W", "Linear_3.b"]
    assert net.ReLU_2 is layers[2]
    net.register_layers(*layers)
    error = "Layer has another ReLU_0; call register_layers once"
    refused(UsageError, error, net.register_layers, layer.ReLU())
    net.register_layers(OrderedDict(last=layer.Linear(1)))
    net.last(images(2, 2))
    assert "last.W" in net.get_params()


def test_parameters_in_lists_and_dictionaries_are_found_once_under_the_name_of_an_attribute_if_they_have_one():
    class Scaled(layer.Layer):
        def __init__(self):
            self.linear = layer.Linear(3)
            self.scales = [Tensor(data=np.arange(3.0) + n, stores_grad=True) for n in range(2)]
            self.shifts = {"out": (Tensor((3,), stores_grad=True), Tensor((3,)))}
            self.again = [self.scales, self.shifts["out"]]

        def initialize(self, x):
            self.linear(x)
            self.weights = [self.linear.W]

        def forward(self, x):
            return self.linear(x) * self.scales[0] * self.scales[1] + self.shifts["out"][0]

    net = Scaled()
    net(Tensor((2, 5)))
    assert list(net.get_params()) == ["linear.W", "linear.b", "scales.0", "scales.1", "shifts.out.0"]
    assert net.get_params()["scales.1"].to_numpy().tolist() == [1, 2, 3]
    assert "Scaled, 27 parameters\n  linear Linear: W [5, 3], b [3], 18 parameters" in str(net)
    net.requires_grad = False
    assert not net.scales[1].requires_grad


def test_methods_of_layers_and_operators_of_scripts():
    own = layer.Layer()
    assert own._initialized is False
    half, single = Tensor((2,), dtype=np.float16), Tensor((2,))
    param = Tensor((2,), stores_grad=True)
    own.device_check(half, single)
    own.dtype_check(half, single, param)
    assert (single.dtype, param.dtype) == (np.float16, np.float32)
    operator = autograd.Operator("Mine")
    assert (operator.get_params(), operator.output_name(1), operator.grad_name(1)) == ([], "Mine:1", "Mine:1_g")


def check(function, t, std, uniform):
    device.get_default_device().SetRandSeed(3)
    function(t)
    assert t.array.std() == pytest.approx(std, rel=0.02)
    assert abs(t.array.mean()) < 0.02 * std
    highest = np.abs(t.array).max()
    assert (highest <= np.sqrt(3) * std * 1.0001) == uniform
    assert highest > 0.99 * np.sqrt(3) * std


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("name", OF_FANS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_spread_follows_from_the_fans(name, kind, shape, dtype):
    t = Tensor(shape, dtype=dtype)
    check(getattr(initializer, f"{name}_{kind}"), t, OF_FANS[name](*SHAPES[shape]), kind == "uniform")
    assert t.dtype == dtype


def test_older_names_and_plain_values():
    matrix, images = Tensor((200, 300)), Tensor((80, 40, 5, 3))
    for fans, std in [((30, 20), np.sqrt(4 / 50)), ((30,), np.sqrt(2 / 30)), ((0, np.int64(20)), np.sqrt(2 / 20))]:
        check(lambda t, fans=fans: initializer.gaussian(t, *fans), matrix, std, False)
    for function, is_uniform in ((initializer.xavier, True), (initializer.glorot, False)):
        check(function, matrix, np.sqrt(2 / 500), is_uniform)
        check(function, images, np.sqrt(2 / 120), is_uniform)
    check(initializer.msra, matrix, np.sqrt(2 / 200), False)
    check(initializer.msra, images, np.sqrt(2 / 80), False)
    assert initializer.xavier_uniform is initializer.glorot_uniform
    assert initializer.xavier_normal is initializer.glorot_normal
    t = Tensor((40, 30))
    initializer.uniform(t, 2, 3)
    assert 2 <= t.array.min() < 2.01
    assert 2.99 < t.array.max() <= 3
    initializer.constant(t, 4)
    assert (t.array == 4).all()
    initializer.zero(t)
    assert not t.array.any()


@pytest.mark.parametrize(("n", "m"), [(7, 4), (4, 7), (5, 5)])
def test_orthogonal_and_eye(n, m):
    t = Tensor((n, m))
    device.get_default_device().SetRandSeed(3)
    initializer.orthogonal(t, 2.0)
    product = t.array.T @ t.array if n >= m else t.array @ t.array.T
    np.testing.assert_allclose(product, 4 * np.eye(min(n, m)), atol=1e-5)
    assert np.abs(t.array).min() > 0
    initializer.eye(t)
    np.testing.assert_array_equal(t.array, np.eye(n, m))
