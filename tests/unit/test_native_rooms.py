"""The rooms of csrc: which may include which, no cycles, Python in the bindings alone."""

import re
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


def includes_of(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """For every source its includes, each with the quote or bracket before it."""
    return {
        path.relative_to(folder).as_posix(): INCLUDE.findall(path.read_text())
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".h", ".cpp", ".cu")
    }


def violations(sources: dict[str, list[tuple[str, str]]]) -> list[str]:
    """Violations of the rules, a line each."""
    found = []
    for source, includes in sources.items():
        room = source.split("/")[0]
        if room not in ALLOWED:
            found.append(f"{source} is in no room of {', '.join(ALLOWED)}")
            continue
        for quote, target in includes:
            if quote == "<":
                if target.startswith(("nanobind/", "Python.h")) and room != "bind":
                    found.append(f"{source} includes <{target}>; Python belongs in bind/")
            elif target not in {*sources, SHARED}:
                found.append(f'{source} includes "{target}", which is no path from csrc/')
            elif not {target.split("/")[0], target} & (ALLOWED[room] | {room}):
                found.append(
                    f"{source} includes {target}; {room}/ may include {', '.join(sorted(ALLOWED[room])) or 'no room'}"
                )
    return found


def cycle(sources: dict[str, list[tuple[str, str]]]) -> list[str]:
    """A chain of files that ends where it begins, or nothing."""
    done: set[str] = set()

    def visit(source: str, chain: list[str]) -> list[str]:
        if source in chain:
            return [*chain[chain.index(source) :], source]
        if source in done:
            return []
        for quote, target in sources.get(source, []):
            if quote == '"' and (found := visit(target, [*chain, source])):
                return found
        done.add(source)
        return []

    return next((found for source in sources if (found := visit(source, []))), [])


def test_rooms_include_what_they_may():
    sources = includes_of(CSRC)
    assert {source.split("/")[0] for source in sources} == set(ALLOWED)
    assert {("<", "atomic"), ('"', "base/types.h")} <= set(sources["host/layout.h"])
    assert violations(sources) == []
    assert cycle(sources) == []
