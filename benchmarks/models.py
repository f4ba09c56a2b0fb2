"""The networks of the examples: the reference CNN, of 431,080 parameters, and ResNets."""

from __future__ import annotations

import sys
from typing import Any

from distopt import model, opt, tensor

from .output import ROOT
from .peers.ranks.train import synthetic_batch

sys.path.insert(0, str(ROOT / "examples"))
import train_cnn
from zoo import models

PARAMETERS = 431_080


class CNN(train_cnn.CNN):
    """The CNN with what its optimizer sends: by its codec, or if `partial`, partial updates."""

    partial = False

    def train_one_batch(self, x: tensor.Tensor, y: tensor.Tensor) -> tuple[tensor.Tensor, tensor.Tensor]:
        """Outputs and loss of a batch; the optimizer takes its step."""
        out = self.forward(x)
        loss = self.softmax_cross_entropy(out, y)
        if self.partial:
            self.optimizer.step_by("partialUpdate", loss)
        else:
            self.optimizer(loss)
        return out, loss


def resnet(name: str = "resnet50", size: int = 224) -> model.Model:
    """The network of that name in examples/zoo, in the shape for images as large as ImageNet's."""
    return models.build(name, 1000, max(size, 64))


def sgd(momentum: float = 0.9) -> opt.SGD:
    """The optimizer of all measurements."""
    return opt.SGD(lr=0.005, momentum=momentum, weight_decay=1e-5)


def compiled(
    optimizer: opt.DistOpt, batch: int | tuple, *, use_graph: bool = False, net: model.Model | None = None
) -> Any:
    """Collective. A network with that optimizer, and images and labels, given or so many of this rank."""
    arrays = synthetic_batch({"batch_size": batch}, optimizer.global_rank) if isinstance(batch, int) else batch
    x, y = (tensor.from_numpy(array, optimizer.device) for array in arrays)
    net = net or train_cnn.CNN()
    net.set_optimizer(optimizer)
    net.compile([x], is_train=True, use_graph=use_graph, sequential=False)
    return net, x, y
