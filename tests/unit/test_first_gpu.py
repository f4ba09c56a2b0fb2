"""`make first-gpu` where there is no GPU: parts that hang, crash or are missing, and what is packed for elsewhere."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conformance.ranks import run_ranks
from tests.emulation import build
from tests.gpu import first_gpu, first_parts, pack, test_peers
from tests.gpu.first_gpu import Part

SLEEP = f"time.sleep({1000 + os.getpid()})"  # no other test on this machine has this line
HANG = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; {SLEEP}']); "
HANG += f"print('| a | table |'); print('began', flush=True); {SLEEP}"


def runs(tmp_path: Path, parts: tuple[Part, ...], facts: dict[str, str] | None = None, minutes: float = 10.0):
    rows = first_gpu.run_parts(parts, tmp_path, facts or {}, minutes, sys.executable, os.environ, "Head.")
    text = (tmp_path / "first-gpu.md").read_text()
    assert all(f"| {row.name} | {row.result} | " in text for row in rows)
    return rows, text


# -- parts -------------------------------------------------------------------------------------------------------------
def test_parts_that_hang_or_crash_do_not_keep_the_rest_from_running(tmp_path, capfd):
    parts = (
        Part("hangs", 4, ("-c", HANG), ()),
        Part("crashes", 100, ("-c", "import os; print('so far', flush=True); os.kill(os.getpid(), 11)"), ()),
        Part("fails", 100, ("-c", "print('wrong | sum'); raise SystemExit(3)"), ()),
        Part("skips", 100, ("-c", "print('no torch'); raise SystemExit(77)"), ()),
        Part("cannot start", 100, ("-c", ""), (), before=("/nowhere/sanitizer",)),
        Part("passes", 100, ("-c", "print('| 1 | 2 |'); print('well')"), ()),
        Part("needs a GPU", 20, ("-c", ""), ("GPU", "NCCL 2.30")),
    )
    rows, text = runs(tmp_path, parts, {"GPU": "no driver", "NCCL 2.30": "no driver"})
    assert [row.result for row in rows] == [
        *("stopped after 4 s", "crashed", "failed", "not run", "failed", "passed", "not run")
    ]
    assert [row.says for row in rows][1:4] == [
        "exit code -11, SIGSEGV: so far",
        "exit code 3: wrong | sum",
        "no torch",
    ]
    assert rows[0].says == "began"
    assert rows[6].says == "no driver"
    assert "| needs a GPU | not run | 0.0 | no driver |" in text
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


# -- bodies, on the emulated GPU ---------------------------------------------------------------------------------------
@pytest.mark.slow
def test_every_kernel_runs():
    build.build()
    code = "from tests.emulation import activate; activate(); from tests.gpu.first_parts import PARTS, lacks; "
    code += "assert not lacks()['GPU']; raise SystemExit(PARTS['kernels']())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_measurements_on_a_gpu():
    """Their numbers mean nothing here; the test is that none ends in an error."""
    build.build()
    code = "import sys; from tests.emulation import activate; activate(); "
    code += "from benchmarks.__main__ import main; sys.exit(main())"
    only = "--elements", "500", "--selected-from", "500", "--only", "ceilings", "kernels", "select", "cnn"
    command = [sys.executable, "-c", code, "gpu", *only]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "CNN step, batch 64, CUDA graphs" in ended.stdout


def test_a_killed_peer():
    build.build()
    first, _ = run_ranks(test_peers.lose, 2, "killed", True)
    assert first.error is None, first.trace


# -- the pack ----------------------------------------------------------------------------------------------------------
def test_what_is_packed_can_be_installed(tmp_path):
    wheel, packed = tmp_path / "some-1.0-py3-none-any.whl", tmp_path / "packed" / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in (
            ("some.py", "text = 'packed'"),
            ("some-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some\nVersion: 1.0\n"),
            ("some-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("some-1.0.dist-info/RECORD", "some.py,,\n"),
        ):
            archive.writestr(name, text)
    packed.parent.mkdir()
    pack.pack_wheel(wheel, packed, [90])
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-index",
        "--no-deps",
        "--target",
        str(tmp_path),
        str(packed),
    ]
    subprocess.run(install, check=True)
    assert (tmp_path / "some.py").read_text() == "text = 'packed'"
