"""Small data sets in the formats that SINGA's scripts read, made of real MNIST digits.

CIFAR-10 and CIFAR-100 are replaced by digits of 32 x 32 pixels in ten colours: the label is the digit, and digit and
colour. The folder of images, which `largedataset_cnn` reads, holds such digits as PNG files, a folder per class; so do
those of `healthcare` and `malaria_cnn`. Tables of `healthcare` are generated: the label is the sign of a sum.

python -m instruments.singa.data FOLDER writes them all, in both sizes.
"""

import gzip
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from examples.data import idx, mnist


@dataclass(frozen=True)
class Size:
    """Numbers of images."""

    train: int  # a multiple of 5, as CIFAR-10 has five files
    test: int
    images: int  # of largedataset_cnn, which takes four fifths for training


# The small ones are for networks that take images of 224 or 299 pixels: two steps of two images on each of two ranks.
SIZES = {"normal": Size(2560, 640, 800), "small": Size(10, 4, 20)}


def write(folder: Path, digits: mnist.Digits, size: Size) -> None:
    """Write all data sets in one size."""
    train = digits.train_x[: size.train], digits.train_y[: size.train]
    test = digits.test_x[: size.test], digits.test_y[: size.test]
    write_mnist(folder / "mnist", train, test)
    write_cifar(folder, train, test)
    images = digits.train_x[-size.images :], digits.train_y[-size.images :]
    write_images(folder / "images", *images)
    write_health(folder / "health", *images)


def write_mnist(folder: Path, train, test) -> None:
    folder.mkdir(parents=True)
    pairs = [(x.reshape(len(x), -1) / np.float32(255), y) for x, y in (train, test, test)]
    (folder / "mnist.pkl.gz").write_bytes(gzip.compress(pickle.dumps(pairs)))
    arrays = train[0][:, 0], train[1], test[0][:, 0], test[1]
    for (name, _, _), array in zip(mnist.FILES, arrays, strict=True):
        (folder / f"{name}.gz").write_bytes(gzip.compress(idx.encode(array.astype(np.uint8))))


def write_cifar(folder: Path, train, test) -> None:
    for name in ("cifar-10-batches-py", "cifar-100-python"):
        (folder / name).mkdir()
    batches = zip(np.split(train[0], 5), np.split(train[1], 5), strict=True)
    for i, (x, y) in enumerate(batches, 1):
        pickle_cifar(folder / f"cifar-10-batches-py/data_batch_{i}", coloured(x)[0], labels=y)
    pickle_cifar(folder / "cifar-10-batches-py/test_batch", coloured(test[0])[0], labels=test[1])
    for name, (x, y) in {"train": train, "test": test}.items():
        images, colours = coloured(x)
        pickle_cifar(folder / f"cifar-100-python/{name}", images, fine_labels=10 * y + colours)


def pickle_cifar(path: Path, images, **labels) -> None:
    content = {"data": images.reshape(len(images), -1), **{name: y.tolist() for name, y in labels.items()}}
    path.write_bytes(pickle.dumps(content))


def coloured(x):
    """Digits (N, 1, 28, 28) as images (N, 3, 32, 32) in ten colours, and the number of each image's colour."""
    colours = np.arange(len(x)) % 10
    palette = np.stack([colours / 9, 1 - colours / 9, colours % 3 / 2], axis=1)[:, :, None, None]
    return np.pad(x * palette, [(0, 0), (0, 0), (2, 2), (2, 2)]).astype(np.uint8), colours


def write_images(folder: Path, x, y) -> None:
    images, _ = coloured(x)
    names = [f"digit_{i}" for i in range(10)]
    for name in names:
        (folder / "Data" / name).mkdir(parents=True)
    (folder / "classes.txt").write_text("\n".join(names) + "\n")
    for i, (image, label) in enumerate(zip(images, y, strict=True)):
        Image.fromarray(np.moveaxis(image, 0, -1)).save(folder / "Data" / names[label] / f"{i}.png")


def write_health(folder: Path, x, y) -> None:
    """The tables and folders of images of `healthcare` and `malaria_cnn`."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    features = rng.standard_normal((320, 11)).astype(np.float32)
    labels = (features.sum(axis=1) > 0).astype(np.int64)
    for name in ("candidiasis", "cerebrovascular"):
        table = np.column_stack([features, labels])
        np.savetxt(folder / f"{name}_data.csv", table, delimiter=",", header="a table")
    # A feature is an image of one pixel there.
    for name, array in {"features": features[:, :, None], "labels": labels}.items():
        (folder / f"kidney_{name}.pkl").write_bytes(pickle.dumps(array))
    images, _ = coloured(x[:160])
    for i, (image, label) in enumerate(zip(images, y[:160] % 2, strict=True)):
        picture = Image.fromarray(np.moveaxis(image, 0, -1))
        malaria = f"{'testing' if i % 5 == 0 else 'training'}_set/{('Uninfected', 'Parasitized')[label]}"
        for kind in (f"malaria/{malaria}", f"diaret/{label}", f"blood/{'val' if i % 5 == 0 else 'train'}/{label}"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            picture.resize((28, 28)).save(folder / kind / f"{i}.png")
    (folder / "blood/param.json").write_text('{"num_classes": 2}')


def main() -> None:
    digits = mnist.load()
    if digits.kind != "mnist":
        sys.exit(f"the digits are {digits.source}; set DISTOPT_DATA_DIR to a folder with the files of MNIST")
    for name, size in SIZES.items():
        write(Path(sys.argv[1]) / name, digits, size)


if __name__ == "__main__":
    main()
