"""Files of generated digits, as those of MNIST."""

from pathlib import Path

import numpy as np

from examples.data import idx, synthetic


def write_digits(folder: Path, n_train: int, n_test: int) -> Path:
    """The folder, with images and labels."""
    folder.mkdir(exist_ok=True)
    for name, count, seed in (("train", n_train, 1), ("t10k", n_test, 2)):
        images, labels = synthetic.digits(count, seed)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx.encode(images[:, 0]))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx.encode(labels.astype(np.uint8)))
    return folder
