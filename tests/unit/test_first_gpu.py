"""`make first-gpu` without a GPU: parts that hang, crash or are missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulation import build
from tests.gpu import first_gpu, first_parts
from tests.gpu.first_gpu import Part

SLEEP = f"time.sleep({1000 + os.getpid()})"  # no other test on this machine has this line
HANG = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; {SLEEP}']); "
HANG += f"print('| a | table |'); print('began', flush=True); {SLEEP}"


def runs(tmp_path: Path, parts: tuple[Part, ...]):
    rows = first_gpu.run_parts(parts, tmp_path, 10.0, sys.executable, os.environ, "Head.")
    text = (tmp_path / "first-gpu.md").read_text()
    assert all(f"| {row.name} | {row.result} | " in text for row in rows)
    return rows, text


# -- parts -------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_parts_that_hang_or_crash_do_not_keep_the_rest_from_running(tmp_path, capfd):
    parts = (
        Part("hangs", 4, ("-c", HANG)),
        Part("crashes", 100, ("-c", "import os; print('so far', flush=True); os.kill(os.getpid(), 11)")),
        Part("fails", 100, ("-c", "print('wrong | sum'); raise SystemExit(3)")),
        Part("skips", 100, ("-c", "print('no torch'); raise SystemExit(77)")),
        Part("cannot start", 100, ("-c", ""), before=("/nowhere/sanitizer",)),
        Part("passes", 100, ("-c", "print('| 1 | 2 |'); print('well')")),
    )
    rows, text = runs(tmp_path, parts)
    assert [row.result for row in rows] == [*("stopped after 4 s", "crashed", "failed", "not run", "not run", "passed")]
    assert [row.says for row in rows][1:4] == [
        "exit code -11, SIGSEGV: so far",
        "exit code 3: wrong | sum",
        "no torch",
    ]
    assert rows[0].says == "began"
    assert "| cannot start | not run | 0.0 | there is no /nowhere/sanitizer |" in text
    assert "wrong / sum" in text
    assert "hangs:\n\n| a | table |" in text
    assert "passes:\n\n| 1 | 2 |" in text
    assert first_gpu.exit_code(rows) == 1
    assert capfd.readouterr().out.count("\n") == len(parts)
    ended = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert SLEEP not in ended, "what a part started ends with it"


def test_every_part_names_something_that_exists():
    for part in (first_gpu.VERSIONS, *first_gpu.WITHOUT_GPU, *first_gpu.ON_GPU):
        for word in part.arguments:
            assert not word.endswith(".py") or (first_gpu.ROOT / word).exists(), word
        if "tests.gpu.first_parts" in part.arguments:
            assert part.arguments[-1] in first_parts.PARTS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (
            "from tests.gpu.first_parts import PARTS; sys.exit(PARTS['gpu']() or PARTS['kernels']())",
            "Emulated GPU, driver ",
        ),
        ("from benchmarks.__main__ import main; sys.exit(main())", "CNN step, batch 64, CUDA graphs"),
    ],
    ids=["every kernel", "the measurements"],
)
def test_bodies_run_on_the_emulated_gpu(body, shown):
    build.build()
    code = f"import sys; from tests.emulation import activate; activate(); {body}"
    words = ["gpu", "--elements", "500", "--selected-from", "500", "--only", "ceilings", "kernels", "select", "cnn"]
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert shown in ended.stdout
