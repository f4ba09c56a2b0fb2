"""The way of a gradient stays short, and the docs show it."""

import re
import subprocess
import sys

from tests.processes import ROOT


def test_one_step_enters_few_files_and_the_docs_show_them():
    ended = subprocess.run(
        [sys.executable, "-m", "tests.unit.gradient_path"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    *way, total = ended.stdout.strip().splitlines()
    files, visits = map(int, re.fullmatch(r"(\d+) files, (\d+) visits", total).groups())
    assert files <= 8
    assert len(way) == visits <= 14
    documented = (ROOT / "docs" / "reference" / "architecture.md").read_text()
    assert "\n".join(way) in documented, ended.stdout
