"""One rank of a training run in shards, started in any way; it prints its place and the hash of its states.

python -m instruments.one_hash.job nn norm
distopt run --nproc-per-node 3 --module instruments.one_hash.job torch cnn
mpiexec -n 4 python -m instruments.one_hash.job nn cnn --hosts blocks
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from contextlib import closing
from types import SimpleNamespace

import numpy as np

from distopt import comm, launch, opt, tensor
from distopt.data import ShardedSampler
from distopt.launch.job.base import Job

from . import nets

SHARDS, SEED, BATCH = 8, 7, 2
HOSTS = {"blocks": lambda rank: rank // 2, "round-robin": lambda rank: rank % 2}  # number of a rank's emulated host
STEPS = {"cnn": 30, "norm": 30, "resnet18": 2}


def job_of(hosts: str | None) -> Job:
    """This rank's job; on emulated hosts it is started by MPI."""
    if hosts is None:
        return launch.join()
    from mpi4py import MPI

    from distopt.launch.job.mpi import MpiJob

    return MpiJob(host=f"host{HOSTS[hosts](MPI.COMM_WORLD.rank)}")


def train(name: str, communicator: comm.Communicator, shards: int = SHARDS, **options) -> dict[str, np.ndarray]:
    """Train a net of the package's own front; the states of model and optimizer."""
    x, y = nets.data(name)
    sgd = opt.SGD(lr=0.05, momentum=0.9, weight_decay=1e-4)
    dist = opt.DistOpt(sgd, communicator=communicator, shards=shards, seed=SEED, clip_grad_norm=1.0, **options)
    dist.device.SetRandSeed(3 + dist.global_rank)  # rank 0's parameters count
    net = nets.net(name)
    net.set_optimizer(dist)
    net.compile([tensor.from_numpy(x[:2])], is_train=True)
    sampler = ShardedSampler(len(x), dist.world_size, dist.global_rank, BATCH, seed=1, shards=shards)
    for indices in itertools.islice(batches(sampler), STEPS[name]):
        for part in dist.shards(indices):
            net(tensor.from_numpy(x[part]), tensor.from_numpy(y[part]))
    return {**{key: value.to_numpy() for key, value in net.get_states().items()}, **dist.get_states()}


def batches(sampler):
    """The batches of one epoch after the other."""
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from sampler


def train_torch(name: str, front: str, backend: str) -> dict[str, np.ndarray]:
    """Train a net of PyTorch's by DistOpt or by DDP's hook; the states of model and optimizer."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import distopt.torch

    torch.set_num_threads(1)  # the same for any number of ranks
    dist.init_process_group(backend)
    torch.manual_seed(0)
    net, (x, y) = nets.torch_net(name), map(torch.from_numpy, nets.data(name))
    torch.manual_seed(dist.get_rank())
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    if front == "ddp":
        called = DistributedDataParallel(net)
        cut, function = distopt.torch.hook(called, shards=SHARDS, seed=SEED)
        called.register_comm_hook(cut, function)
        step = sgd
    else:
        called = net
        cut = step = distopt.torch.DistOpt(sgd, net.named_parameters(), shards=SHARDS, seed=SEED, model=net)
    sampler = distopt.torch.ResumableSampler(len(x), BATCH, seed=1, shards=SHARDS)
    schedule = torch.optim.lr_scheduler.StepLR(step, 10)
    for indices in itertools.islice(batches(sampler), STEPS[name]):
        for part in cut.shards(indices):
            torch.nn.functional.cross_entropy(called(x[part]), y[part].long()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        step.step()
        schedule.step()
    states = {key: value.numpy() for key, value in net.state_dict().items()}
    momenta = {f"momentum {i}": each["momentum_buffer"].numpy() for i, each in enumerate(sgd.state.values())}
    dist.destroy_process_group()
    return states | momenta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("front", choices=["nn", "torch", "ddp"])
    parser.add_argument("net", choices=nets.SIDES)
    parser.add_argument("--transport", default="auto", help="for nn")
    parser.add_argument("--backend", default="distopt", help="of the process group, for ddp and torch")
    parser.add_argument("--hosts", choices=HOSTS, help="emulate hosts")
    args = parser.parse_args()
    if args.front == "nn":
        with closing(job_of(args.hosts)) as job, comm.create(job, args.transport) as communicator:
            states, rank, kind = train(args.net, communicator), job.topology.rank, communicator.name
    else:
        if args.hosts:
            pretend(args.hosts)
        kind = args.backend
        states, rank = train_torch(args.net, args.front, kind), launch.join().topology.rank
    sys.stdout.write(f"rank {rank} over {kind}: {nets.hash_of(states)}\n")  # one write: whole lines


def pretend(hosts: str) -> None:
    """Have PyTorch's ranks believe to be on several hosts."""
    from distopt.torch import store_job

    host = f"host{HOSTS[hosts](int(os.environ['RANK']))}"
    store_job.host_identity = lambda: host
    store_job.socket = SimpleNamespace(gethostname=lambda: host)


if __name__ == "__main__":
    main()
