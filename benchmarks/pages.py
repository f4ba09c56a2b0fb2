"""What the commands of this folder that write pages share."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def put(page: Path, command: str, text: str) -> None:
    """Replace what stands between the marks of `command` (as "network.py") in `page`."""
    begin, end = (f"<!-- table of benchmarks/{command}: {word} -->" for word in ("begin", "end"))
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{page} has no lines {begin} and {end}; put them where the text belongs")
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")


def add_root_to_path() -> None:
    """Let processes that are started from now on import this checkout."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
