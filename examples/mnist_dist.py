"""Train the CNN on MNIST under MPI: mpiexec --hostfile examples/hosts python examples/mnist_dist.py"""

from __future__ import annotations

import train_cnn

from distopt import launch, opt


def train_mnist(args) -> None:
    sgd = opt.SGD(lr=args.learning_rate, momentum=0.9, weight_decay=1e-5)
    sgd = opt.DistOpt(sgd)
    train_cnn.run(sgd, args)


if __name__ == "__main__":
    launch.main(train_mnist, args=(train_cnn.parse_args(__doc__),))
