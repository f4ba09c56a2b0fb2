"""Networks for images of any size and number of channels, by name: `build("resnet18", image_size=32)`."""

from __future__ import annotations

from distopt import autograd, layer, model, tensor

# Images smaller than this have no rows and columns to lose before the first block.
_LARGE = 64


class GlobalMean(layer.Layer):
    """The mean of each channel of [N, C, H, W]: [N, C]."""

    def initialize(self, x):
        self.pool, self.flatten = layer.AvgPool2d(x.shape[2:], 1), layer.Flatten()

    def forward(self, x):
        return self.flatten(self.pool(x))


class Sequence(layer.Layer):
    """Layers one after the other."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for each in self.layers:
            x = each(x)
        return x


class Residual(layer.Layer):
    """`main(x)`, normalized by `norm` if given, plus x, by way of `shortcut` if given; `norm` adds before its ReLU."""

    def __init__(self, main, shortcut=None, norm=None):
        super().__init__()
        self.main, self.shortcut, self.norm = main, shortcut, norm

    def forward(self, x):
        y, other = self.main(x), self.shortcut(x) if self.shortcut else x
        return self.norm(y, other) if self.norm else autograd.add(y, other)


class Network(model.Model):
    """A network as the training function of `train_cnn` takes it.

    Attributes:
        half: whether to compute in float16, with float32 parameters.
    """

    half = False

    def __init__(self, *layers):
        super().__init__()
        self.body, self.loss = Sequence(*layers), layer.SoftMaxCrossEntropy()

    def forward(self, x):
        return self.body(autograd.cast(x, tensor.float16) if self.half else x)

    def train_one_batch(self, x, y, dist_option=None, spars=0.05):
        out = self.forward(x)
        loss = self.loss(out, y)
        if dist_option is None:
            self.optimizer(loss)
        else:
            self.optimizer.step_by(dist_option, loss, spars=spars)
        return out, loss


def resnet(counts, expansion, classes, size, norm):
    """Of arXiv 1512.03385, with the stride in the 3 x 3 convolutions; bottlenecks if `expansion` is more than 1."""

    def convolved(channels, kernel, stride=1, activation="RELU"):
        convolution = layer.Conv2d(channels, kernel, stride=stride, padding=kernel // 2, bias=False)
        return convolution, norm(activation=activation)

    layers = [*convolved(64, 7, 2), layer.MaxPool2d(3, 2, 1)]
    if size < _LARGE:
        layers = [*convolved(64, 3)]
    inputs = 64
    for stage, count in enumerate(counts):
        channels = 64 << stage
        for i in range(count):
            stride = 2 if stage and not i else 1
            sizes = [(channels, 3, stride), (channels, 3)]
            if expansion > 1:
                sizes = [(channels, 1), (channels, 3, stride), (expansion * channels, 1)]
            *main, last = [part for each in sizes for part in convolved(*each)]
            changes = (inputs, stride) != (expansion * channels, 1)
            shortcut = Sequence(*convolved(expansion * channels, 1, stride, None)) if changes else None
            layers.append(Residual(Sequence(*main), shortcut, last))
            inputs = expansion * channels
    return Network(*layers, GlobalMean(), layer.Linear(classes))


def alexnet(classes, size):
    """In the shape of arXiv 1404.5997; with smaller windows for small images."""
    first = layer.Conv2d(64, 11, stride=4, padding=2) if size >= 2 * _LARGE else layer.Conv2d(64, 5, padding=2)
    rest = [layer.Conv2d(channels, 3, padding=1, activation="RELU") for channels in (384, 256, 256)]
    return Network(
        *(first, layer.ReLU(), layer.MaxPool2d(3, 2)),
        *(layer.Conv2d(192, 5, padding=2, activation="RELU"), layer.MaxPool2d(3, 2)),
        *(*rest, layer.MaxPool2d(3, 2), layer.Flatten()),
        *(layer.Dropout(0.5), layer.Linear(4096, activation="RELU")),
        *(layer.Dropout(0.5), layer.Linear(4096, activation="RELU"), layer.Linear(classes)),
    )


def cnn(classes, size):
    """The network of `train_cnn`."""
    del size
    convolutions = (layer.Conv2d(n, 5, activation="RELU", pool=layer.MaxPool2d(2, 2)) for n in (20, 50))
    return Network(*convolutions, layer.Flatten(), layer.Linear(500, activation="RELU"), layer.Linear(classes))


def mlp(classes, size):
    del size
    return Network(
        *(layer.Flatten(), layer.Linear(512, activation="RELU"), layer.Linear(512, activation="RELU")),
        layer.Linear(classes),
    )


def xceptionnet(classes, size, norm):
    """Of arXiv 1610.02357; its first convolution keeps rows and columns of small images."""

    def separable(channels):
        return layer.SeparableConv2d(channels, 3, padding=1), norm()

    def block(*sizes, stride=2, leads=True):
        main = [part for channels in sizes for part in (layer.ReLU(), *separable(channels))][0 if leads else 1 :]
        if stride == 1:
            return Residual(Sequence(*main))
        shortcut = Sequence(layer.Conv2d(sizes[-1], 1, stride=stride, bias=False), norm())
        return Residual(Sequence(*main, layer.MaxPool2d(3, stride, 1)), shortcut)

    stride = 2 if size >= _LARGE else 1
    return Network(
        *(layer.Conv2d(32, 3, stride=stride, padding=1, bias=False), norm(), layer.ReLU()),
        *(layer.Conv2d(64, 3, padding=1, bias=False), norm(), layer.ReLU()),
        *(block(128, 128, leads=False), block(256, 256), block(728, 728)),
        *(block(728, 728, 728, stride=1) for _ in range(8)),
        *(block(728, 1024), *separable(1536), layer.ReLU(), *separable(2048), layer.ReLU()),
        *(GlobalMean(), layer.Linear(classes)),
    )


RESNETS = {"resnet18": ((2, 2, 2, 2), 1), "resnet34": ((3, 4, 6, 3), 1), "resnet50": ((3, 4, 6, 3), 4)}
MODELS = ("cnn", "mlp", "alexnet", *RESNETS, "xceptionnet")


def build(name, classes=10, image_size=28, norm=layer.BatchNorm2d):
    """Local. The network of that name from `MODELS`, not compiled, for images of `image_size` rows.

    Args:
        name: as in `MODELS`.
        classes: number of classes.
        image_size: rows and columns of an image.
        norm: makes the batch normalizations: `layer.BatchNorm2d`, or `layer.SyncBatchNorm2d` for small batches.
    """
    if name in RESNETS:
        return resnet(*RESNETS[name], classes, image_size, norm)
    if name == "xceptionnet":
        return xceptionnet(classes, image_size, norm)
    return {"cnn": cnn, "mlp": mlp, "alexnet": alexnet}[name](classes, image_size)
