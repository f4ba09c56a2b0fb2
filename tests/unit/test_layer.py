"""Layers: names, parameters, lazy shapes and what they refuse."""

from collections import OrderedDict

import numpy as np
import pytest

from distopt import autograd, device, layer
from distopt.errors import StateError, UsageError
from distopt.nn.core.tensor import Tensor


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
    shapes = {name: p.shape for name, p in block.get_params().items()}
    assert shapes == {
        "conv.W": (4, 3, 3, 3),
        "conv.b": (4,),
        "norm.scale": (4,),
        "norm.bias": (4,),
        "branches.0.W": (4, 4, 1, 1),
        "branches.1.W": (4, 4, 1, 1),
        "branches.1.b": (4,),
    }
    assert all(p.stores_grad for p in block.get_params().values())
    assert list(block.get_states()) == [*shapes, "norm.running_mean", "norm.running_var"]
    memory = block.conv.W.array
    block(images(1, 3, 7, 4))
    assert block.conv.W.array is memory


def test_a_parameter_shared_by_two_layers_is_one(training):
    class Tied(layer.Layer):
        def __init__(self):
            self.first, self.second = layer.Linear(4), layer.Linear(4)

        def forward(self, x):
            y = self.first(x)
            self.second(y)
            self.second.W = self.first.W
            return self.second(y)

    net = Tied()
    x = images(3, 4, dtype=np.float64)
    loss = autograd.reduce_sum(net(x))
    assert list(net.get_params()) == ["first.W", "first.b", "second.b"]
    order = [net.second.b, net.first.W, net.first.b]
    assert autograd.gradient_order(loss) == order
    assert [p for p, _ in autograd.backward(loss)] == order
    w = net.first.W.array
    ones = np.ones((3, 4))
    expected = (x.array @ w + net.first.b.array).T @ ones + x.array.T @ (ones @ w.T)
    np.testing.assert_allclose(net.first.W.grad.array, expected)


def test_values_can_be_set_all_or_none():
    source, target = Block(), Block()
    for block in (source, target):
        block(images(2, 3, 5, 5))
    source.norm.running_mean.set_value(3)
    target.set_states(source.get_states())
    for name, value in source.get_states().items():
        np.testing.assert_array_equal(target.get_states()[name].array, value.array)
    arrays = {name: p.to_numpy() + 1 for name, p in source.get_params().items()}
    before = {name: p.to_numpy() for name, p in target.get_params().items()}
    for wrong, message in [
        ({**arrays, "conv.b": np.zeros(5, np.float32)}, r"conv.b is float32 of shape \(4,\), that of the states"),
        ({**arrays, "conv.b": np.zeros(4)}, "that of the states float64"),
        ({**arrays, "x": np.zeros(1)}, "the model has no x"),
        ({k: v for k, v in arrays.items() if k != "norm.bias"}, "norm.bias is missing"),
    ]:
        with pytest.raises(StateError, match=message):
            target.set_params(wrong)
        for name, value in before.items():
            np.testing.assert_array_equal(target.get_params()[name].array, value)
    target.set_params(arrays)
    np.testing.assert_array_equal(target.conv.W.array, arrays["conv.W"])


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


def test_reshape_cat_and_add():
    a, b = images(2, 3), images(2, 4)
    np.testing.assert_array_equal(layer.Cat(1)([a, b]).data, np.concatenate([a.array, b.array], 1))
    np.testing.assert_array_equal(layer.Reshape()(a, (3, -1)).data, a.array.reshape(3, 2))
    np.testing.assert_array_equal(layer.Add()(a, a).data, 2 * a.array)
    assert layer.Flatten(axis=2)(images(2, 3, 4)).shape == (6, 4)
    assert layer.Flatten()(images(0, 3, 4)).shape == (0, 12)


class Net(layer.Layer):
    def __init__(self, item):
        self.item = item

    def forward(self, x):
        return self.item(x)


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
    net = Net(make())
    for _ in range(2):
        with pytest.raises(UsageError) as caught:
            net(images(*shape))
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_types_that_do_not_fit_are_named_by_layer():
    for make, shape in ((lambda: layer.Linear(3), (2, 3)), (lambda: layer.Conv2d(3, 1), (2, 3, 4, 4))):
        with pytest.raises(UsageError, match="item takes float16, float32 or float64, got uint8; convert"):
            Net(make())(Tensor(shape, dtype=np.uint8))
        net = Net(make())
        net(images(*shape))
        with pytest.raises(UsageError, match="item has parameters of float32, got an input of float64"):
            net(images(*shape, dtype=np.float64))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layer.Conv2d(8, 0), "kernel_size is 0; it must be an integer of at least 1"),
        (lambda: layer.Conv2d(8, 3, stride=0), "stride is"),
        (lambda: layer.Conv2d(8, 3, padding=-1), "padding is -1; it must be an integer of at least 0"),
        (lambda: layer.Conv2d(8, 3, padding=(1, 1, 1)), r"padding is .*; got \(1, 1, 1\)"),
        (lambda: layer.Conv2d(8, 3, padding=None), "padding is None; it must be"),
        (lambda: layer.MaxPool2d(2, pad_mode="SAME"), "unknown pad_mode 'SAME'; choose one of NOTSET, SAME_UPPER, SA"),
        (lambda: layer.Conv2d(8, 3, dilation=2), "Conv2d has no dilation, as in SINGA"),
        (lambda: layer.Conv2d(8, 3, group=3), "8 kernels cannot be divided into 3 groups"),
        (lambda: layer.Conv2d(8, 3, group=0), "group is 0; it must be an integer of at least 1"),
        (lambda: layer.Conv2d(8, 3, pool=layer.MaxPool2d(2, pad_mode="SAME_UPPER")), "Conv2d pools with even padding"),
        (lambda: layer.Conv2d(8, 3, pool=layer.MaxPool2d(2, 2, (0, 1, 0, 1))), "Conv2d pools with even padding"),
        (lambda: layer.MaxPool1d((2, 2)), "kernel_size is"),
        (lambda: layer.Conv2d(3, 8, 3, 1, 1, 1), "Conv2d takes"),
        (lambda: layer.Conv2d(3, (8, 8), 3), "Conv2d takes"),
        (lambda: layer.Conv2d(8, 3, activation="TANH"), "unknown activation 'TANH'"),
        (lambda: layer.Conv2d(8, 3, pool=layer.AvgPool2d(2)), "Conv2d pools by a MaxPool2d layer"),
        (lambda: layer.Linear(1, 2, 3), "Linear takes"),
        (lambda: layer.Dropout(1.0), r"ratio of Dropout is 1.0; it must be a number in \[0, 1\)"),
        (lambda: layer.BatchNorm2d(momentum=2), r"a number in \[0, 1\]"),
        (lambda: layer.Conv2d(0, 3), "nb_kernels is 0; it must be an integer of at least 1"),
        (lambda: layer.Linear(8, -1), "out_features is -1; it must be an integer of at least 1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("shape", "labels", "message"),
    [
        (
            (4, 3),
            np.array([0, 1, 2, 0], np.float32),
            r"labels \[N\] are class indices, got float32; make them tensor.int32",
        ),
        ((4, 3), np.array([[0], [1], [2], [0]], np.int32), r"scores \[4, 3\] need 4 labels.*; got \[4, 1\]"),
        (
            (4, 3),
            np.arange(3, dtype=np.int32),
            r"scores \[4, 3\] need 4 labels: class indices \[4\], or dis.*; got \[3\]",
        ),
        ((4, 3), np.eye(4, dtype=np.float32), r"need 4 labels: .* distributions \[4, 3\]; got \[4, 4\]"),
        ((4, 3, 1, 1), np.arange(4, dtype=np.int32), r"takes scores \[N, classes\], got \[4, 3, 1, 1\]; put a Flatten"),
    ],
)
def test_labels_that_do_not_fit_are_explained(shape, labels, message):
    with pytest.raises(UsageError, match=message):
        layer.SoftMaxCrossEntropy()(images(*shape), Tensor.of(labels))


def test_one_hot_labels_of_integers_are_the_classes():
    scores, classes = images(4, 3), np.array([2, 0, 1, 2], np.int32)
    loss = layer.SoftMaxCrossEntropy()(scores, Tensor.of(np.eye(3, dtype=np.int32)[classes]))
    assert loss.shape == (1,)  # as in SINGA: scripts print tensor.to_numpy(loss)[0]
    np.testing.assert_allclose(loss.array, layer.SoftMaxCrossEntropy()(scores, Tensor.of(classes)).array, rtol=1e-6)


@pytest.mark.parametrize("transA", [False, True])
@pytest.mark.parametrize("transB", [False, True])
@pytest.mark.parametrize("bias_shape", [None, (4, 1), False])
def test_gemm(training, transA, transB, bias_shape):
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
    dy = np.cos(np.arange(20.0)).reshape(4, 5)
    gradients = {p: g.to_numpy() for p, g in autograd.backward(y, Tensor.of(dy))}
    dw = 0.5 * left.T @ dy
    np.testing.assert_allclose(gradients.pop(gemm.W), dw.T if transB else dw, rtol=1e-12)
    if bias_shape is not False:
        db = 3.0 * dy.sum(axis=0 if bias_shape is None else 1).reshape(gemm.b.shape)
        np.testing.assert_allclose(gradients.pop(gemm.b), db, rtol=1e-12)
    assert not gradients
    with pytest.raises(AssertionError, match="Gemm expects 3 inputs, got 7"):  # what SINGA raises
        gemm(images(*((7, 4) if transA else (4, 7)), dtype=np.float64))
    with pytest.raises(UsageError, match=r"Gemm expects a matrix, got \[2, 3, 1\]; put a Flatten before it"):
        gemm(images(2, 3, 1, dtype=np.float64))


def test_losses_of_probabilities():
    x = autograd.sigmoid(images(4, 3))
    t = Tensor.of(x.array[::-1].copy())
    assert layer.CrossEntropy()(x, t).item() == autograd.cross_entropy(x, t).item()
    assert layer.BinaryCrossEntropy()(x, t).item() == autograd.binary_cross_entropy(x, t).item()


def test_bias_may_be_the_third_argument_of_linear():
    linear = layer.Linear(3, 2, False)
    linear(images(1, 3))
    assert list(linear.get_params()) == ["W"]


@pytest.mark.parametrize(
    ("without", "shape"),
    [
        (layer.Linear(2, bias=False), (1, 3)),
        (layer.Gemm(2, bias=False), (1, 3)),
        (layer.Conv2d(2, 1, bias=False), (1, 3, 2, 2)),
    ],
)
def test_a_layer_without_bias_has_none_under_its_name(without, shape):
    without(images(*shape))
    assert without.b is None
    assert list(without.get_params()) == ["W"]


def test_a_layer_without_forward_says_so():
    with pytest.raises(NotImplementedError, match="Layer has no forward"):
        layer.Layer()(1)


# -- how layers are found and named ------------------------------------------------------------------------------------
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
    assert list(tower.get_params()) == (
        ["first.W", *blocks, "heads.small.W", "heads.large.0.W"]
        if registered
        else ["first.W", "heads.small.W", "heads.large.0.W", *blocks]
    )
    other = Tower(registered)
    other(images(2, 3, 5, 5))
    tower.get_states()[f"{first}.shortcut.norm.running_var"].set_value(7)
    other.set_states({name: value.to_numpy() for name, value in tower.get_states().items()})
    for a, b in zip(tower(images(2, 3, 5, 5)), other(images(2, 3, 5, 5)), strict=True):
        np.testing.assert_array_equal(a.array, b.array)


def test_registered_layers_are_named_by_class_and_number():
    class Sequence(layer.Layer):
        def __init__(self):
            super().__init__()
            self.layers = [layer.ReLU(), layer.Linear(3), layer.ReLU(), layer.Linear(2)]
            self.register_layers(*self.layers)

        def forward(self, x):
            for item in self.layers:
                x = item(x)
            return x

    net = Sequence()
    net(images(2, 4))
    assert list(net.get_params()) == ["Linear_1.W", "Linear_1.b", "Linear_3.W", "Linear_3.b"]
    assert net.ReLU_2 is net.layers[2]
    net.register_layers(*net.layers)
    with pytest.raises(UsageError, match="Sequence has another ReLU_0; call register_layers once"):
        net.register_layers(layer.ReLU())
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


def test_a_layer_made_for_the_first_input_knows_its_path():
    class Outer(layer.Layer):
        def initialize(self, x):
            self.inner = layer.SeparableConv2d(x.shape[1], 4, 3)

        def forward(self, x):
            return self.inner(x)

    holder = layer.Layer()
    holder.outer = Outer()
    holder.outer(images(1, 2, 5, 5))
    assert holder.outer.inner.depthwise_conv.name == "outer.inner.depthwise_conv"
    assert {n: p.shape for n, p in holder.get_params().items()} == {
        "outer.inner.depthwise_conv.W": (2, 1, 3, 3),
        "outer.inner.point_conv.W": (4, 2, 1, 1),
    }
