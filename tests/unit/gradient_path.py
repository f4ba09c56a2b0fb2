"""The way of one gradient in steady state: Python files of distopt, in the order in which a step enters them.

`python -m tests.unit.gradient_path` follows `opt(loss)` outside `nn`, and prints what docs/reference/architecture.md
shows. Two ranks, shared memory, a small net in one bucket, fp32. A visit is an entry into a file from another one, by
the `call` events of `sys.setprofile`. Coming back is none, and files of other packages do not count.
"""

import sys
from pathlib import Path

import distopt
from distopt import launch, singa_wrap
from tests.ranks.small_net import batch, build, make

PACKAGE = Path(distopt.__file__).parent
STEPS = 5


class Way:
    """The files that the calls inside `with` enter one after the other, each with the functions called there."""

    def __init__(self):
        self._way = []

    def __enter__(self):
        self._way.clear()
        sys.setprofile(self._note)

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        code = frame.f_code
        path = Path(code.co_filename)
        if event != "call" or not path.is_relative_to(PACKAGE) or code.co_name.startswith("<"):
            return  # comprehensions, which newer Pythons do not call, are none
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("nn/"):
            if not self._way or self._way[-1][0] != name:
                self._way.append((name, []))
            self._way[-1][1].append(code.co_name)

    def show(self):
        for number, (name, functions) in enumerate(self._way, 1):
            print(f"{number:2} {name}: {', '.join(dict.fromkeys(functions))}")
        print(f"{len({name for name, _ in self._way})} files, {len(self._way)} visits", flush=True)


def walk(rank: int, world_size: int, ticket) -> None:
    optimizer = make(rank, world_size, ticket, bucket_elements=10**6)
    net, way = build(optimizer), Way()

    def step(loss):
        with way:
            optimizer(loss)

    for number in range(STEPS):
        net(*batch(number, rank), step)
    optimizer.communicator.barrier()
    if rank == 0:
        way.show()


if __name__ == "__main__":
    launch.main(walk, 2, (singa_wrap.NcclIdHolder(),))
