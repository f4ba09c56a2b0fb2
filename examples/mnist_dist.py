"""Train the CNN on MNIST under MPI: mpiexec --hostfile examples/hosts python examples/mnist_dist.py"""

from __future__ import annotations

from argparse import Namespace

import train_cnn

from distopt import launch, opt


def train_mnist(args: Namespace) -> None:
    sgd = opt.SGD(lr=args.learning_rate, momentum=0.9, weight_decay=1e-5)
    train_cnn.run(opt.DistOpt(sgd), args)


if __name__ == "__main__":
    launch.main(train_mnist, args=(train_cnn.parse_args(__doc__),))
