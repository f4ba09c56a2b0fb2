"""Train the CNN on MNIST with WORLD_SIZE processes on this machine: python examples/mnist_multiprocess.py 2"""

from __future__ import annotations

from argparse import Namespace

import train_cnn

from distopt import launch, opt, singa_wrap


def train_mnist(rank: int, world_size: int, nccl_id: singa_wrap.NcclIdHolder, args: Namespace) -> None:
    sgd = opt.SGD(lr=args.learning_rate, momentum=0.9, weight_decay=1e-5)
    train_cnn.run(opt.DistOpt(sgd, nccl_id=nccl_id, local_rank=rank, world_size=world_size), args)


if __name__ == "__main__":
    args = train_cnn.parse_args(__doc__, with_world_size=True)
    nccl_id = singa_wrap.NcclIdHolder()
    launch.main(train_mnist, args.world_size, (nccl_id, args))
