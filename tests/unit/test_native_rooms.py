"""The rooms of csrc: which may include which, no cycles, Python in the bindings alone."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
# Other rooms that a room may include; an entry with a slash is one file.
ALLOWED = {
    "base": set(),
    "host": {"base"},
    "shm": {"base", "host", "cpu/reduce.h"},
    "mpi": {"base", "host", "shm", "cpu/reduce.h"},
    "nccl": {"base", "host", "cuda/check.h"},
    "cpu": {"base"},
    "cuda": {"base"},
    "bind": {"base", "host", "shm", "mpi", "nccl", "cpu", "cuda"},
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
            elif target not in sources:
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
    assert violations(sources) == []
    assert cycle(sources) == []


@pytest.mark.parametrize(
    ("source", "text", "fact"),
    [
        ("base/types.h", '#include "host/layout.h"', "base/types.h includes host/layout.h; base/ may include no room"),
        ("nccl/board.h", '#include "shm/messages.h"', "nccl/board.h includes shm/messages.h; nccl/ may include base"),
        ("nccl/board.h", '#include "cuda/select.h"', "nccl/board.h includes cuda/select.h"),
        ("cpu/pool.h", "#  include <nanobind/nanobind.h>", "Python belongs in bind/"),
        ("cuda/codec.cu", '#include "codec.h"', "no path from csrc/"),
        ("gpu/codec.cu", "", "gpu/codec.cu is in no room"),
    ],
)
def test_a_wrong_include_is_found(tmp_path, source, text, fact):
    files = dict.fromkeys(("host/layout.h", "shm/messages.h", "cuda/select.h", "cuda/codec.h", "cuda/check.h"), "")
    files["nccl/handles.h"] = '#include "cuda/check.h"\n#include <vector>\n'
    for name, content in {**files, source: f"#pragma once\n{text}\n"}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    (found,) = violations(includes_of(tmp_path))
    assert fact in found


def test_a_cycle_is_found():
    sources = {"cpu/a.h": [('"', "cpu/b.h")], "cpu/b.h": [("<", "vector"), ('"', "cpu/c.h")], "cpu/c.h": []}
    assert cycle(sources) == []
    sources["cpu/c.h"].append(('"', "cpu/a.h"))
    assert cycle(sources) == ["cpu/a.h", "cpu/b.h", "cpu/c.h", "cpu/a.h"]
