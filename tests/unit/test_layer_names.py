"""How layers are found and named: registered, in functions, in collections, and made for the first input."""

from collections import OrderedDict

import numpy as np
import pytest

from distopt import autograd, layer
from distopt.errors import UsageError
from tests.unit.test_layer import images


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
