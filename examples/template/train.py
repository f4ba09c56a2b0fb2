"""Train a network with PyTorch's DDP over distopt: on this machine, on several by hand, or under Slurm.

    python train.py -cpus 2                                           two ranks on the CPUs of this machine
    python train.py -gpus 0,1                                         two ranks, on these GPUs
    python train.py -cpus 2 -dist_url tcp://A:29500 -nnodes 2 -node_rank 0      on A; on the other node: -node_rank 1
    distopt run --nproc-per-node 2 train.py -cpus 2                   or by torchrun, mpiexec or srun
    python train.py -slurm -slurm_nnodes 2 -slurm_ncpus 2 -slurm_partition P    or -slurm_ngpus 8

-arch, -dataset, -trainer, -loss, -optimizer and -scheduler are names of files in the folders beside this one. To add
one, write the file; it may have options of its own. The folder of -out gets the output of every rank, the checkpoints,
from which the same command resumes, and numbers for TensorBoard (-tb).
"""

import os
import socket
import sys

import board
import loop
import options
import torch

from distopt import launch
from distopt.errors import DistoptError
from distopt.torch import Checkpoint


def main() -> None:
    try:
        args, launched = options.parse(__doc__), launch.launcher()
        if launched is not None and launched.size == 1:
            launched = None
        options.check_launcher(args, launched)
        is_first = (args.node_rank if launched is None else launched.rank) == 0
        if args.reset and is_first:
            reset(args.out)
        if args.slurm:
            import slurm

            job = slurm.submit(args)
    except DistoptError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    with board.served(args.out / "board", args.tb_port if args.tb and is_first else None):
        if args.slurm:
            if args.tb or args.slurm_wait:
                job.results()  # raises if a rank has failed
            return
        with socket.socket() as holder:  # of a port where the ranks meet, if no option or launcher names one
            if launched is not None:
                args.dist_url = args.dist_url or endpoint(launched, holder)
                launch.main(run_launched, None, (launched, args))
            else:
                args.dist_url = args.dist_url or f"tcp://127.0.0.1:{options.hold_port(holder, 0)}"
                launch.main(run_here, len(args.gpus) or args.cpus, (args,))


def run_here(local_rank: int, ranks: int, args) -> None:
    """Run a rank of this machine."""
    loop.run(args.node_rank * ranks + local_rank, args.nnodes * ranks, device_of(local_rank, args), args.dist_url, args)


def run_launched(launched: launch.LauncherInfo, args) -> None:
    """Run the rank that a launcher has started."""
    local_rank = launched.rank if launched.local_rank is None else launched.local_rank
    loop.run(launched.rank, launched.size, device_of(local_rank, args), args.dist_url, args)


def device_of(local_rank: int, args) -> torch.device:
    return torch.device("cuda", args.gpus[local_rank]) if args.gpus else torch.device("cpu")


def endpoint(launched: launch.LauncherInfo, holder: socket.socket) -> str:
    """Collective. Where the ranks of a launcher meet: its own endpoint, else a port of rank 0's host."""
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return "env://"
    host = "127.0.0.1" if launched.local_size == launched.size else socket.gethostname()
    offer = f"tcp://{host}:{options.hold_port(holder, 0)}" if launched.rank == 0 else ""
    return launch.join().all_gather(offer.encode())[0].decode()


def reset(out) -> None:
    """Forget the job before, unless it is still running."""
    checkpoint = Checkpoint(out / "checkpoints")
    checkpoint.resume(reset=True)
    for path in (*out.glob("board/*"), *out.glob("logs/*")):
        path.unlink()
    checkpoint.close()


if __name__ == "__main__":
    main()
