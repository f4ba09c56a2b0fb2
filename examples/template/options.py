"""The command line, and whether it can be carried out here."""

import argparse
import re
import shutil
import socket
from importlib.util import find_spec
from pathlib import Path

import parts
import torch

from distopt.errors import UsageError
from distopt.launch import LauncherInfo


class Parser(argparse.ArgumentParser):
    """Options may be written with one dash or with two. Errors are raised, and become one line."""

    def add_argument(self, *names, **settings):
        return super().add_argument(*names, *(f"-{name}" for name in names if name[1] != "-"), **settings)

    def _get_option_tuples(self, option_string):
        return []  # No abbreviations: before the files are known, -data would mean -dataset.

    def error(self, message):
        raise UsageError(f"{message} (see -help)")


def parse(description: str, argv: list[str] | None = None) -> argparse.Namespace:
    """The options, checked, with those of the chosen files."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False)
    for what, (folder, default) in parts.FOLDERS.items():
        parser.add_argument(f"-{what}", default=default, help=f"({default}) of {', '.join(parts.names(folder))}")
    for what, name in vars(parser.parse_known_args(argv)[0]).items():
        chosen = parts.part(what, name)
        if hasattr(chosen, "add_options"):
            chosen.add_options(parser)
    add_options(parser)
    args = parser.parse_args(argv)
    args.out = Path(args.out).resolve()
    on_gpus = args.slurm_ngpus if args.slurm else args.gpus
    args.backend = args.backend or ("nccl" if on_gpus else "distopt")
    if args.slurm:
        check_slurm()
    else:
        check_here(args)
    if args.tb and args.node_rank == 0:
        if missing := [name for name in ("tensorboardX", "tensorboard") if find_spec(name) is None]:
            raise UsageError(f"-tb needs {' and '.join(missing)}; pip install {' '.join(missing)}")
        check_port("-tb_port", args.tb_port)
    return args


def add_options(parser: Parser) -> None:
    add = parser.add_argument
    add("-h", "-help", action="help", help="show this, and end")
    add("-cpus", type=int, default=1, metavar="N", help="(1) ranks on CPUs of this machine")
    add("-gpus", type=numbers, default=[], metavar="0,1", help="GPUs of this machine, each of which gets a rank")
    add("-backend", choices=["distopt", "gloo", "nccl"], help="(distopt; nccl on GPUs)")
    add("-dist_url", default="", metavar="tcp://HOST:PORT", help="where the ranks meet: any free port of node 0")
    add(
        "-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="(300) for a rank that is late, at the start, too",
    )
    add("-nnodes", type=int, default=1, help="(1) nodes on which this command is typed, with as many ranks")
    add("-node_rank", type=int, default=0, help="(0) which of them this is")
    add("-slurm", action="store_true", help="submit a job that is queued again when it is preempted or out of time")
    add("-slurm_nnodes", type=int, default=1, help="(1) nodes")
    add("-slurm_ncpus", type=int, default=1, help="(1) ranks of each node, on CPUs")
    add("-slurm_ngpus", type=int, default=0, help="or ranks of each node, each on a GPU")
    add("-slurm_threads", type=int, default=1, help="(1) cores of each rank; workers need some, too")
    add("-slurm_partition", metavar="P", help="(Slurm's default)")
    add("-slurm_nodelist", metavar="A,B", help="(any nodes)")
    add("-slurm_minutes", type=int, default=60, help="(60) time limit of each run of the job")
    add("-slurm_wait", action="store_true", help="wait until the job has ended")
    add("-out", default="runs", metavar="DIR", help="(runs) for all output, on a file system of all nodes")
    add("-reset", action="store_true", help="remove checkpoints and logs in the folder of -out; start anew")
    add("-save_every", type=int, default=100, metavar="STEPS", help="(100)")
    add("-log_every", type=int, default=50, metavar="STEPS", help="(50)")
    add("-tb", action="store_true", help="write for TensorBoard, and serve its page until the training has ended")
    add("-tb_port", type=int, default=6006, help="(6006) of this machine")
    add("-timeline", metavar="DIR", help="write a timeline of each rank; see distopt timeline --help")
    add("-epochs", type=int, default=10, help="(10)")
    add("-batch_size", type=int, default=64, help="(64) samples of a rank and a step")
    add("-lr", type=float, default=0.03, help="(0.03) learning rate")
    add("-seed", type=int, default=1, help="(1)")
    add("-workers", type=int, default=0, help="(0) processes of each rank that load data")
    add("-fp16", action="store_true", help="autocast: float16 on GPUs, bfloat16 on CPUs")


def check_launcher(args: argparse.Namespace, launched: LauncherInfo | None) -> None:
    """Refuse options that contradict the launcher that has started this process."""
    if launched is not None and (args.slurm or args.nnodes > 1):
        option = "-slurm" if args.slurm else "-nnodes"
        raise UsageError(f"{option}: {launched.name} has started {launched.size} ranks already; leave it out")
    count = len(args.gpus) or args.cpus
    if launched is not None and count != (there := launched.local_size or launched.size):
        option = "-gpus" if args.gpus else "-cpus"
        raise UsageError(f"{option}: {launched.name} has started {there} ranks here, and this asks for {count}")


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def check_here(args: argparse.Namespace) -> None:
    count = torch.cuda.device_count()
    if missing := [str(gpu) for gpu in args.gpus if gpu >= count]:
        there = f"GPUs 0 to {count - 1}" if count else "no GPU that PyTorch can use; -cpus N trains without"
        raise UsageError(f"-gpus: there is no {', '.join(missing)}; this machine has {there}")
    if args.dist_url or args.nnodes > 1:
        if not re.fullmatch(r"tcp://.+:\d+", args.dist_url):
            raise UsageError(f"-dist_url: {args.dist_url!r} is not tcp://HOST:PORT of node 0, the same on all nodes")
        if args.node_rank == 0:
            check_port("-dist_url", int(args.dist_url.rpartition(":")[2]))


def check_port(option: str, port: int) -> None:
    with socket.socket() as holder:
        try:
            hold_port(holder, port)
        except OSError as error:
            free = f"port {hold_port(holder, 0)} is free"
            raise UsageError(f"{option}: port {port} of {socket.gethostname()}: {error.strerror}; {free}") from None


def hold_port(holder: socket.socket, port: int) -> int:
    """Keep this port, or any free one if it is 0, for servers that set SO_REUSEADDR, as PyTorch's store does."""
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", port))
    return holder.getsockname()[1]


def check_slurm() -> None:
    if shutil.which("sbatch") is None:
        raise UsageError("-slurm: there is no Slurm here (no sbatch); -cpus N or -gpus 0,1 train on this machine")
    if find_spec("submitit") is None:
        raise UsageError("-slurm needs submitit; pip install submitit")
