"""README promises commands; each runs here, or in `.ci/run`, or is a Makefile target that one of them runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SHELL = [line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]
IN_TABLE = re.findall(r"\| `([^`]*\.py[^`]*)` \|", README)


def test_shell_commands_are_run_by_ci():
    ci = (ROOT / ".ci/run").read_text()
    assert SHELL
    for command in SHELL:
        assert re.search(rf"^{re.escape(command)}\b", ci, re.M), f"{command!r} stands in README and not in .ci/run"


def test_commands_of_the_table_are_run_by_the_makefile():
    examples = (ROOT / "Makefile").read_text().replace("$(BIN)/", "")
    assert len(IN_TABLE) == 4
    for command in IN_TABLE:
        assert command in examples, f"{command!r} stands in README and not in the Makefile"


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.S))
def test_python_snippets_run(code, tmp_path):
    script = tmp_path / "snippet.py"
    script.write_text(code)
    env = {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, script]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.rpartition(" ")[0] for line in done.stdout.splitlines())
    assert lines == ["[rank 1] loss", "loss"]


def test_messages_of_the_table_are_those_of_the_code():
    table = README[README.index("| you see |") :]
    quoted = re.findall(r"^\| `(.*?)` \|", table, re.M)
    pieces = [piece.strip() for text in quoted for piece in re.split(r"\.\.\.|\d+|all_reduce|[(),#]", text)]
    files = [
        path for folder in ("distopt", "csrc") for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp")
    ]
    sources = re.sub(r'"\s+f?"', "", "\n".join(path.read_text() for path in files))
    assert len(quoted) == 6
    for piece in pieces:
        assert piece in sources, f"README quotes {piece!r}, which no code says"
