"""The way of one `opt(loss)` in steady state: Python files outside `nn`, in the order in which it enters them.

python -m tests.unit.gradient_path          prints it; two ranks, shared memory, a small net in one bucket, fp32

A visit is an entry into a file from another one, by the `call` events of `sys.setprofile`. Coming back is none, and
files of `nn` and of other packages do not count.
"""

import sys
from pathlib import Path

import distopt
from distopt import launch, singa_wrap
from tests.ranks.small_net import batch, build, make

PACKAGE = Path(distopt.__file__).parent


def visits(calls: list[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """The files that calls, of file and function, enter one after the other, each with the functions called there."""
    way: list[tuple[str, list[str]]] = []
    for filename, function in calls:
        path = Path(filename)
        if not path.is_relative_to(PACKAGE) or path.is_relative_to(PACKAGE / "nn"):
            continue
        name = path.relative_to(PACKAGE).as_posix()
        if function.startswith("<"):  # comprehensions, which newer Pythons do not call
            continue
        if not way or way[-1][0] != name:
            way.append((name, []))
        way[-1][1].append(function)
    return way


def walk(rank: int, world_size: int, ticket) -> None:
    optimizer = make(rank, world_size, ticket, bucket_elements=10**6)
    net = build(optimizer)
    calls: list[tuple[str, str]] = []

    def note(frame, event, _):
        if event == "call":
            calls.append((frame.f_code.co_filename, frame.f_code.co_name))

    def watched(loss):
        sys.setprofile(note)
        try:
            optimizer(loss)
        finally:
            sys.setprofile(None)

    for number in range(5):
        calls.clear()
        net(*batch(number, rank), watched)
    optimizer.communicator.barrier()
    if rank == 0:
        way = visits(calls)
        for number, (name, functions) in enumerate(way, 1):
            print(f"{number:2} {name}: {', '.join(dict.fromkeys(functions))}")
        print(f"{len({name for name, _ in way})} files, {len(way)} visits", flush=True)


if __name__ == "__main__":
    launch.main(walk, 2, (singa_wrap.NcclIdHolder(),))
