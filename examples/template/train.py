"""Train a network with PyTorch's DDP over distopt: on this machine, on several by hand, or under Slurm.

    python train.py -cpus 2                                           two ranks on the CPUs of this machine
    python train.py -gpus 0,1                                         two ranks, on these GPUs
    python train.py -cpus 2 -dist_url tcp://A:29500 -nnodes 2 -node_rank 0      on A; on the other node: -node_rank 1
    python train.py -slurm -slurm_nnodes 2 -slurm_ncpus 2 -slurm_partition P    or -slurm_ngpus 8

-arch, -dataset, -trainer, -loss, -optimizer and -scheduler are names of files in the folders beside this one. To add
one, write the file; it may have options of its own. The folder of -out gets the output of every rank, the checkpoints,
from which the same command resumes, and numbers for TensorBoard (-tb).
"""

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
        args = options.parse(__doc__)
        if args.reset and args.node_rank == 0:
            reset(args.out)
        if args.slurm:
            import slurm

            job = slurm.submit(args)
    except DistoptError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    with board.served(args.out / "board", args.tb_port if args.tb and args.node_rank == 0 else None):
        if not args.slurm:
            with socket.socket() as holder:  # of a port where the ranks meet if all are on this machine
                args.dist_url = args.dist_url or f"tcp://127.0.0.1:{options.hold_port(holder, 0)}"
                launch.main(run_here, len(args.gpus) or args.cpus, (args,))
        elif args.tb or args.slurm_wait:
            job.results()  # raises if a rank has failed


def run_here(local_rank: int, ranks: int, args) -> None:
    """Run a rank of this machine."""
    device = torch.device("cuda", args.gpus[local_rank]) if args.gpus else torch.device("cpu")
    loop.run(args.node_rank * ranks + local_rank, args.nnodes * ranks, device, args.dist_url, args)


def reset(out) -> None:
    """Forget the job before, unless it is still running."""
    checkpoint = Checkpoint(out / "checkpoints")
    checkpoint.resume(reset=True)
    for path in (*out.glob("board/*"), *out.glob("logs/*")):
        path.unlink()
    checkpoint.close()


if __name__ == "__main__":
    main()
