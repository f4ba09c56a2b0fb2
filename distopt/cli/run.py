"""`distopt run`: start the ranks of a job with torchrun's options; on several nodes, run the same command on each."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..autoload import AS_GLOO
from ..errors import LaunchError, UsageError
from ..settings import Settings
from .values import at_least, positive

if TYPE_CHECKING:
    from ..launch.agents.options import RunOptions

_ENDPOINT_PORT, _MASTER_PORT = 29400, 29500  # torchrun's
_TIMEOUTS = {"join_timeout", "timeout"}  # keys of --rdzv-conf with the meaning of --rdzv-timeout

# Options of torchrun that concern only how it works, and options that do nothing here, as a line then says.
_MEANINGLESS = ("start-method", "monitor-interval", "event-log-handler")
_WITHOUT_EFFECT = (
    *("local-addr", "logs-specs", "log-line-prefix-template", "duplicate-stdout-filters", "duplicate-stderr-filters"),
    *("numa-binding", "signals-to-handle", "shutdown-timeout"),
)

_EXAMPLES = """\
on one node:      distopt run --nproc-per-node 4 train.py --epochs 10
on each of two:   distopt run --nnodes 2 --nproc-per-node 4 --rdzv-endpoint NODE0:29400 train.py --epochs 10
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="start the ranks of a job, on one node or several",
        description="Start the ranks of a job and end them together. Run the same line on every node.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="distopt run [options] SCRIPT [arguments of the script]",
        allow_abbrev=False,
    )

    def add(name: str, *short: str, **how: Any) -> None:
        spellings = dict.fromkeys([*short, f"--{name}", f"--{name.replace('-', '_')}"])
        parser.add_argument(*spellings, dest=name.partition("=")[0].replace("-", "_"), **how)

    add("nnodes", type=_range_of(at_least(1)), default="1", metavar="N", help="number of nodes (default: 1)")
    add(
        "nproc-per-node",
        type=_range_of(_ranks),
        default="1",
        metavar="N",
        help="ranks on this node, or cpu for one per core; with --heal, both may be a range, as 1:4",
    )
    add("node-rank", type=at_least(0), metavar="N", help="number of this node (default: from the endpoint's owner)")
    add(
        "rdzv-endpoint",
        metavar="HOST[:PORT],...",
        help="where the nodes meet; the node that has this address is node 0; with --heal several, as h0,h1,h2:29400",
    )
    add("rdzv-id", default="none", metavar="NAME", help="name of the job, equal on all nodes")
    add("rdzv-backend", choices=["c10d", "static"], help="static: node 0 owns the endpoint (default: c10d)")
    add("rdzv-timeout", type=positive, default=300.0, metavar="SECONDS", help="for the nodes to come (default: 300)")
    add("master-addr", metavar="HOST", help="with --master-port: the endpoint of a static rendezvous")
    add("master-port", type=_port, metavar="PORT", help=f"(default: {_MASTER_PORT}; on one node, any free port)")
    add("standalone", action="store_true", help="one node; the default")
    add("max-restarts", type=at_least(0), default=0, metavar="K", help="times to start all ranks again (default: 0)")
    add(
        "heal",
        action="store_true",
        help="restart all ranks while they make progress; see 'Checkpoints and healing' in the documentation",
    )
    add(
        "workers",
        choices=["node", "rank"],
        default="",
        help="with --heal: each node, or each rank, is a worker with a world of its own; see DiLoCo(min_workers=)",
    )
    add(
        "alone",
        action="store_true",
        help="with --heal: go on even where no more than half of the last nodes can be reached; the others may, too",
    )
    add("as-gloo", action="store_true", help='CPU groups of PyTorch that ask for "gloo" are distopt\'s')
    add("log-dir", type=Path, metavar="DIR", help="write output to DIR/JOB/attempt_0/RANK/stdout.log too")
    add(
        "redirects",
        "-r",
        type=_streams,
        default={},
        metavar="STREAMS",
        help="1, 2 or 3: stdout, stderr or both of all ranks go to files only; 0:1,1:3 for local ranks (default: 0)",
    )
    add("tee", "-t", type=_streams, default={}, metavar="STREAMS", help="the same, shown as well")
    add("local-ranks-filter", type=_local_ranks, metavar="N,N", help="show the output of these local ranks alone")
    add("role", default="default", metavar="NAME", help="the variable ROLE_NAME of the ranks")
    add("rdzv-conf", type=_pairs, default={}, metavar="KEY=VALUE,...", help="join_timeout or timeout: --rdzv-timeout")
    for name in (*_MEANINGLESS, *_WITHOUT_EFFECT):
        add(name, metavar="VALUE", help=argparse.SUPPRESS)
    add("run-path", action="store_true", help=argparse.SUPPRESS)  # how torchrun starts Python; ranks find no difference
    add("timeline", type=Path, metavar="DIR", help="write a timeline of each rank there; see distopt timeline --help")
    add("watch", action="store_const", const="table", default="", help="show once a second what each rank does")
    # An option of its own: an optional value would take SCRIPT.
    add("watch=json", action="store_const", const="json", default="", help="the same as lines of JSON on stderr")
    parser.add_argument("-n", "-np", "--np", type=_renamed, help=argparse.SUPPRESS)  # mpiexec's and Horovod's
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as of python -m")
    add("no-python", action="store_true", help="SCRIPT is a program of any kind")
    parser.add_argument("script", metavar="SCRIPT", help="what each rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False
    parser.set_defaults(run=_run)


def _range_of(number: Callable[[str], int]) -> Callable[[str], tuple[int, int]]:
    """For a number, or two of them as torchrun's MIN:MAX: the least and the most."""

    def parse(text: str) -> tuple[int, int]:
        least, colon, most = text.partition(":")
        found = number(least), number(most if colon else least)
        if found[0] > found[1]:
            raise argparse.ArgumentTypeError(f"{text!r} is no range; give the smaller number first")
        return found

    return parse


def _ranks(text: str) -> int:
    if text in {"auto", "gpu"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not counted here; give the number")
    return len(os.sched_getaffinity(0)) if text == "cpu" else at_least(1)(text)


def _streams(text: str) -> dict[int, int]:
    """Bits of streams by local rank, as of torchrun's --redirects."""
    from ..launch.agents.options import ALL

    found = {}
    for part in text.split(","):
        rank, colon, streams = part.rpartition(":")
        if streams not in ("0", "1", "2", "3"):
            raise argparse.ArgumentTypeError(f"{part!r}: 0 is nothing, 1 stdout, 2 stderr, 3 both; or RANK:STREAMS,...")
        found[at_least(0)(rank) if colon else ALL] = int(streams)
    return found


def _local_ranks(text: str) -> frozenset[int]:
    return frozenset(at_least(0)(part) for part in text.split(","))


def _pairs(text: str) -> dict[str, str]:
    """Keys and values of torchrun's --rdzv-conf. A timeout is the text of a positive number."""
    found = {}
    for part in filter(None, text.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise argparse.ArgumentTypeError(f"{part!r} is no KEY=VALUE")
        found[key] = value
    for key in _TIMEOUTS & found.keys():
        positive(found[key])
    return found


def _renamed(text: str) -> None:
    raise argparse.ArgumentTypeError(f"the number of ranks is --nproc-per-node {text}")


def _port(text: str) -> int:
    if (number := at_least(1)(text)) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return number


def options_of(args: argparse.Namespace) -> RunOptions:
    """The options of `distopt run` for the parsed command line.

    Raises:
        UsageError: options are missing or contradict each other, or there is no such script.
    """
    from ..launch.agents.options import RunOptions

    _check_combinations(args)
    if args.watch and Settings.from_env().flight_records == 0:
        raise UsageError("--watch reads flight records; unset DISTOPT_FLIGHT_RECORDS=0 or TORCH_FR_BUFFER_SIZE=0")
    if not args.no_python:
        _check_script(args.script, module=args.module)
    elif shutil.which(args.script) is None:
        raise UsageError(f"there is no program {args.script}")
    (least, nodes), (fewest, ranks) = args.nnodes, args.nproc_per_node
    place = _meeting_place(args) if nodes > 1 else _MeetingPlace("127.0.0.1", args.master_port or 0)
    python = () if args.no_python else (sys.executable, *(["-m"] if args.module else []))
    return RunOptions(
        program=(*python, args.script, *args.arguments),
        ranks=ranks,
        nodes=nodes,
        spare_ranks=ranks - fewest,
        spare_nodes=nodes - least,
        node_rank=args.node_rank,
        host=place.host,
        port=place.port,
        more_places=place.more,
        static=place.static,
        run_id=args.rdzv_id,
        restarts=args.max_restarts,
        heal=args.heal,
        log_dir=args.log_dir,
        redirects=args.redirects,
        tee=args.tee,
        shown_ranks=args.local_ranks_filter,
        role=args.role,
        timeout=max(
            (positive(args.rdzv_conf[key]) for key in _TIMEOUTS & args.rdzv_conf.keys()), default=args.rdzv_timeout
        ),
        alone=args.alone,
        watch=args.watch,
        workers=args.workers,
    )


def _check_combinations(args: argparse.Namespace) -> None:
    """Check the options beside each other.

    Raises:
        UsageError: two contradict each other, or one needs another.
    """
    (least, nodes), (fewest, ranks) = args.nnodes, args.nproc_per_node
    if args.node_rank is not None and args.node_rank >= nodes:
        raise UsageError(f"--node-rank {args.node_rank} of --nnodes {nodes}: nodes are numbered from 0")
    if (least, fewest) != (nodes, ranks) and not args.heal:
        raise UsageError("a range of nodes or ranks needs --heal: all ranks start again, with states from memory")
    if args.workers and not args.heal:
        raise UsageError("--workers needs --heal: workers that are lost start again, and the others go on without them")
    if least < nodes and (args.node_rank is not None or args.rdzv_backend == "static" or args.master_addr):
        raise UsageError("nodes of a range get new numbers when one is lost; leave --node-rank out, and --master-addr")
    if not re.fullmatch(r"[\w.:@=+-]+", args.rdzv_id):
        raise UsageError(f"--rdzv-id {args.rdzv_id!r} is not a name of letters, digits and . _ - : @ = +")
    if args.standalone and nodes > 1:
        raise UsageError(f"--standalone is for one node, --nnodes is {nodes}; leave one of them out")
    if args.alone and not args.heal:
        raise UsageError("--alone is for jobs that heal; add --heal, or leave it out")
    if args.no_python and (args.module or args.heal):
        raise UsageError(f"--no-python: {'-m' if args.module else '--heal'} is for Python; leave one of them out")
    if args.workers and (args.redirects or args.tee or args.local_ranks_filter is not None):
        raise UsageError("--redirects, --tee and --local-ranks-filter are for one job; with --workers give --log-dir")


class _MeetingPlace(NamedTuple):
    """Where the agents of the nodes meet; see `RunOptions`."""

    host: str
    port: int
    more: tuple[tuple[str, int], ...] = ()
    static: bool = False


def _meeting_place(args: argparse.Namespace) -> _MeetingPlace:
    """Where several nodes meet.

    Raises:
        UsageError: it is missing, is given twice, or does not suit the other options.
    """
    if args.rdzv_endpoint and args.master_addr:
        raise UsageError("--rdzv-endpoint and --master-addr both say where the nodes meet; give one of them")
    static = args.rdzv_backend == "static" or (args.rdzv_backend is None and bool(args.master_addr))
    if static and args.node_rank is None:
        raise UsageError("a static rendezvous needs --node-rank on every node; or give --rdzv-endpoint alone")
    if args.rdzv_endpoint:
        (host, port), *more = _endpoints(args.rdzv_endpoint, _MASTER_PORT if static else _ENDPOINT_PORT)
        if more and (static or not args.heal):
            raise UsageError("several hosts in --rdzv-endpoint need --heal, and no static rendezvous; give one")
        return _MeetingPlace(host, port, tuple(more), static)
    if args.master_addr:
        _check_host(f"--master-addr {args.master_addr}", args.master_addr, "give a host, its port by --master-port")
        return _MeetingPlace(args.master_addr, args.master_port or _MASTER_PORT, static=static)
    raise UsageError(f"--nnodes {args.nnodes[1]} needs --rdzv-endpoint HOST:PORT: an address of one of the nodes")


def _endpoints(text: str, default: int) -> list[tuple[str, int]]:
    """Each host and port; a host without a port has that of the next one that has one."""
    found: list[tuple[str, int]] = []
    for one in reversed(text.split(",")):
        found.insert(0, _endpoint(one, default))
        default = found[0][1]
    if len(set(found)) < len(found):
        raise UsageError(f"--rdzv-endpoint {text} names a host twice")
    return found


def _endpoint(text: str, default: int) -> tuple[str, int]:
    option, host, port = f"--rdzv-endpoint {text}", text, str(default)
    if "://" in text:
        raise UsageError(f"{option}: leave out {text.partition('://')[0]}://; give HOST:PORT")
    if ":" in text and not text.endswith("]"):  # the colons of an IPv6 address without a port
        host, _, port = text.rpartition(":")
    if _is_ipv6(text) or _is_ipv6(host):
        given = [f"[{host}]:{port}"] * _is_ipv6(host) + [f"[{text}] or [{text}]:PORT"] * _is_ipv6(text)
        raise UsageError(f"{option}: an IPv6 address needs brackets; give {' or '.join(given)}")
    if host[:1] + host[-1:] == "[]":
        host = host[1:-1]
    _check_host(option, host, "give HOST:PORT")
    try:
        return host, _port(port)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{option}: {error}; give HOST:PORT") from None


def _check_host(option: str, host: str, cure: str) -> None:
    if not re.fullmatch(r"[\w.-]+", host) and not _is_ipv6(host):
        raise UsageError(f"{option}: {host!r} is neither the name of a host nor an address; {cure}")


def _is_ipv6(text: str) -> bool:
    """Whether it is an address of that kind, which may end in %, and the name of an interface."""
    try:
        socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
    except (OSError, ValueError):
        return False
    return True


def _check_script(script: str, *, module: bool) -> None:
    """Refuse it here: all ranks would report the same, and ranks of other nodes would wait for them."""
    path = Path(script)
    if not module and re.fullmatch(r"python[\d.]*", path.name) and not path.is_dir():
        raise UsageError(f"the ranks are Python processes already; leave out `{script}`")
    if not module and not path.exists():
        near = f"; did you mean {script}.py?" if Path(f"{script}.py").exists() else ""
        raise UsageError(f"there is no script {script}{near}")
    if not module and path.is_dir() and not (path / "__main__.py").exists():
        raise UsageError(f"{script} is a folder without a __main__.py; give a script")
    if module and path.suffix == ".py" and path.exists():
        raise UsageError(f"-m takes the name of a module, and {script} is a file; leave out -m")
    package = script.partition(".")[0]  # finding what is inside would import it
    if module and find_spec(package) is None and PathFinder.find_spec(package, [str(Path.cwd())]) is None:
        raise UsageError(f"there is no module {script}")


def _run(args: argparse.Namespace) -> int:
    try:
        options = options_of(args)
        _check_tasks(options)
        given = [f"--{name}" for name in _WITHOUT_EFFECT if getattr(args, name.replace("-", "_")) is not None]
        given += [f"{key} of --rdzv-conf" for key in args.rdzv_conf.keys() - _TIMEOUTS]
        for name in given:
            sys.stderr.write(f"distopt run: {name} is torchrun's, and does nothing here\n")
        if args.timeline is not None:
            os.environ["DISTOPT_TIMELINE"] = str(args.timeline)
        if args.watch:
            os.environ["DISTOPT_WATCH"] = "1"
        if args.as_gloo:
            os.environ[AS_GLOO] = "1"
        if (options.redirects or options.tee) and options.log_dir is None:
            options = replace(options, log_dir=Path(tempfile.mkdtemp(prefix="distopt-logs-")))
            sys.stderr.write(f"distopt run: output goes to files in {options.log_dir}\n")
        if options.workers:
            from ..launch.workers.supervisor import run
        else:
            from ..launch.agents.agent import run
        from ..launch.supervise.ranks import LIMITS

        try:
            return run(options)
        except OSError as error:
            if error.errno in LIMITS:
                raise UsageError(f"{error.strerror}{LIMITS[error.errno]}") from None
            raise
    except (LaunchError, UsageError) as error:
        sys.stderr.write(f"distopt run: {error}\n")
        return UsageError.exit_code


def _check_tasks(options: RunOptions) -> None:
    """Refuse to run as one of several tasks of a launcher: each task would start a job of its own."""
    from ..launch.launchers import launcher
    from ..launch.launchers.distopt_run import DISTOPT_RUN

    own = (DISTOPT_RUN.rank, DISTOPT_RUN.size, DISTOPT_RUN.local_rank, DISTOPT_RUN.local_size)
    info = launcher({name: value for name, value in os.environ.items() if name not in own})
    if info is not None and info.size not in {1, *range(options.nodes - options.spare_nodes, options.nodes + 1)}:
        raise UsageError(
            f"{info.name} has started {info.size} copies of distopt run ({info.source}), which is right only with "
            f"--nnodes {info.size} and --rdzv-endpoint HOST:PORT, not with --nnodes {options.nodes}; or start one copy"
        )
