"""Tables, JSON files and pages that benchmarks write, and the machine that they name."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distopt.errors import DistoptError
from distopt.files import atomic_write

ROOT = Path(__file__).parents[1]
_QUIET_LOAD = 0.5  # per core


def write_json(path: Path, report: object) -> None:
    """Write what `--json` asked for; dataclasses as dictionaries."""
    with atomic_write(path) as file:
        file.write(json.dumps(report, indent=1, default=asdict).encode())


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    names = list(head)
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def put(page: Path, name: str, text: str) -> None:
    """Replace the text between the marks of the benchmark `name` in `page`."""
    begin, end = (f"<!-- table of python -m benchmarks {name}: {word} -->" for word in ("begin", "end"))
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise DistoptError(f"{page} has no lines {begin} and {end}; put them where the text belongs")
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")


def import_this_checkout() -> None:
    """Let processes that are started from now on import what this one does."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def machine() -> dict[str, Any]:
    """Properties of this machine that affect measurements."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "host": socket.gethostname(),
        "processor": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def heading(facts: dict[str, Any]) -> str:
    """A description of the machine, with a warning if it is busy: load slows sleeping ranks more than spinning ones."""
    text = f"{facts['cores']} cores of {facts['processor']} ({facts['host']})"
    if facts["load"] > _QUIET_LOAD * facts["cores"]:
        text += f"\n# others are at work here (load average {facts['load']:.1f}): these numbers say little"
    return text
