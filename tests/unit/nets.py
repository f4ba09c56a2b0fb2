"""A model of layers in a row; values by name."""

import numpy as np

from distopt import layer, model
from distopt.nn.core.tensor import Tensor


def copies(named):
    """Copies of tensors or arrays by name, as NumPy's `assert_equal` compares them."""
    return {name: np.array(x.to_numpy() if isinstance(x, Tensor) else x) for name, x in named.items()}


class Chain(model.Model):
    """Layers by name, one after the other, and a loss: softmax cross-entropy, unless another function is given."""

    def __init__(self, loss=None, **layers):
        super().__init__()
        self.names = tuple(layers)
        for name, made in layers.items():
            setattr(self, name, made)
        self.loss = loss or layer.SoftMaxCrossEntropy()

    def forward(self, x):
        for name in self.names:
            x = getattr(self, name)(x)
        return x

    def train_one_batch(self, x, y):
        out = self.forward(x)
        loss = self.loss(out, y)
        self.optimizer(loss)
        return out, loss
