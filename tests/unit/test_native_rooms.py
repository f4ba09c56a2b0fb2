"""The rooms of csrc: which may include which, no cycles, Python in the bindings alone."""

import re
from graphlib import TopologicalSorter
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
SHARED = "kernels/cuda/shared.h"  # in distopt: what kernels of CPU and GPU share
# Other rooms that a room may include; an entry with a slash is one file.
ALLOWED = {
    "base": {SHARED},
    "host": {"base"},
    "shm": {"base", "host", "cpu/reduce.h"},
    "net": {"base", "host", "shm", "cpu/reduce.h"},
    "nccl": {"base", "host"},
    "cpu": {"base", SHARED},
    "bind": {"base", "host", "shm", "net", "nccl", "cpu"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.M)


def test_rooms_include_what_they_may():
    paths = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu")]
    sources = {path.relative_to(CSRC).as_posix(): INCLUDE.findall(path.read_text()) for path in paths}
    assert {source.split("/")[0] for source in sources} == set(ALLOWED)
    assert {("<", "atomic"), ('"', "base/types.h")} <= set(sources["host/layout.h"])
    for source, includes in sources.items():
        room = source.split("/")[0]
        for quote, target in includes:
            if quote == "<":
                is_python = target.startswith(("nanobind/", "Python.h"))
                assert room == "bind" or not is_python, f"{source} includes <{target}>; Python belongs in bind/"
            else:
                assert target in {*sources, SHARED}, f'{source} includes "{target}", which is no path from csrc/'
                allowed = ALLOWED[room] | {room}
                assert {target.split("/")[0], target} & allowed, f"{source} includes {target}, not of {allowed}"
    graph = {source: {target for quote, target in found if quote == '"'} for source, found in sources.items()}
    TopologicalSorter(graph).prepare()  # raises a CycleError with the chain of files that ends where it begins
