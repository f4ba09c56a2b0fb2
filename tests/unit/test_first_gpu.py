"""`make first-gpu` without a GPU: parts that hang, crash or are missing, and the library that it packs."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from instruments.emulation import build
from instruments.gpu import first_gpu, first_parts, pack
from instruments.gpu.first_gpu import Part
from tests.processes import Program, end_all

SLEEP = f"time.sleep({1000 + os.getpid()})"  # no other test on this machine has this line
HANG = "import subprocess, sys, time; "
HANG += f"subprocess.Popen([sys.executable, '-c', 'import time; {SLEEP}'], start_new_session=True); "
HANG += f"print('| a | table |'); print('began', flush=True); {SLEEP}"


@pytest.mark.slow
def test_parts_that_hang_or_crash_do_not_keep_the_rest_from_running(tmp_path, capfd):
    parts = (
        Part("hangs", 4, ("-c", HANG)),
        Part("crashes", 100, ("-c", "import os; print('so far', flush=True); os.kill(os.getpid(), 11)")),
        Part("fails", 100, ("-c", "print('wrong | sum'); raise SystemExit(3)")),
        Part("skips", 100, ("-c", "print('no torch'); raise SystemExit(77)")),
        Part("cannot start", 100, ("-c", ""), before=("/nowhere/sanitizer",)),
        Part("is refused", 100, ("-c", ""), before=("env",), probe=("-c", "raise SystemExit('not allowed')")),
        Part("is let through", 100, ("-c", "print('well')"), before=("env",), probe=("-c", "")),
        Part("passes", 100, ("-c", "print('| 1 | 2 |'); print('well')")),
    )
    rows = first_gpu.run_parts(parts, tmp_path, 10.0, os.environ, "Head.")
    text = (tmp_path / "first-gpu.md").read_text()
    assert all(f"| {row.name} | {row.result} | " in text for row in rows)
    assert [row.result for row in rows] == ["stopped after 4 s", "crashed", "failed", *["not run"] * 3, *["passed"] * 2]
    segv = 'exit code -11, SIGSEGV: File "<string>", line 1 in <module>'
    assert [row.says for row in rows][:4] == ["began", segv, "exit code 3: wrong | sum", "no torch"]
    assert "| cannot start | not run | 0.0 | there is no /nowhere/sanitizer |" in text
    assert rows[5].says == "this machine refuses env: not allowed"
    assert "wrong / sum" in text
    assert "hangs:\n\n| a | table |" in text
    assert "passes:\n\n| 1 | 2 |" in text
    assert "fails, the end of its output:\n\n```\nwrong | sum\n```\n" in text
    assert [row.end[0] for row in rows[:2]] == ["| a | table |", "so far"]
    assert 'File "<string>", line 1 in <module>' in "".join(rows[0].end), "where it was"
    assert "passes, the end" not in text
    assert first_gpu.exit_code(rows) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first-gpu.md", "output.txt"], "few files"
    output = (tmp_path / "output.txt").read_text()
    assert all(f"== {row.name}: {row.result}\n" in output for row in rows)
    assert "== fails: failed\nwrong | sum\n" in output
    assert capfd.readouterr().out.count("\n") == len(parts)
    ended = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert SLEEP not in ended, "what a part started ends with it"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_part_that_cannot_be_killed_is_left_behind(tmp_path, monkeypatch):
    """As one that waits in a driver."""
    monkeypatch.setattr(first_gpu, "ABORT_SECONDS", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(first_gpu, "end_all", lambda *_: None)
        parts = Part("hangs", 2, ("-c", HANG)), Part("passes", 100, ("-c", "print('well')"))
        rows = first_gpu.run_parts(parts, tmp_path, 10.0, os.environ, "Head.")
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if SLEEP.encode() in (folder / "cmdline").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
    assert [row.result for row in rows] == ["stopped after 2 s", "passed"]


def test_parts_that_all_hang_end_within_the_minutes(tmp_path, monkeypatch):
    now, end = 50.0, 50.0 + 60 * 9.0

    def hang(part, seconds, *_):
        nonlocal now
        now += seconds + 2 * first_gpu.ABORT_SECONDS
        return first_gpu.Row(part.name, "stopped", seconds)

    monkeypatch.setattr(first_gpu, "run_part", hang)
    monkeypatch.setattr(first_gpu, "time", SimpleNamespace(monotonic=lambda: now))
    parts = tuple(Part(str(n), 100, ("-c", "")) for n in range(9))
    rows = first_gpu.run_parts(parts, tmp_path, 9.0, os.environ, "Head.")
    assert [row.result for row in rows] == [*["stopped"] * 5, *[first_gpu.NOT_RUN] * 4]
    assert now <= end


def test_every_part_names_something_that_exists_and_every_test_of_a_gpu_is_in_one():
    for part in (first_gpu.VERSIONS, *first_gpu.WITHOUT_GPU, *first_gpu.ON_GPU):
        for word in part.arguments:
            assert not word.endswith(".py") or (first_gpu.ROOT / word).exists(), word
        if "instruments.gpu.first_parts" in part.arguments:
            assert part.arguments[-1] in first_parts.PARTS
    files = {str(path.relative_to(first_gpu.ROOT)) for path in (first_gpu.ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files == files & {word for part in first_gpu.ON_GPU for word in part.arguments}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "call", "shown"),
    [
        ("instruments.gpu.first_parts", "PARTS['gpu']() or own.PARTS['kernels']()", "Emulated GPU, driver "),
        ("benchmarks.__main__", "main()", "CNN step, batch 64, CUDA graphs"),
    ],
    ids=["every kernel", "the measurements"],
)
def test_bodies_run_on_the_emulated_gpu(module, call, shown):
    build.build()
    code = "import sys; from instruments.emulation import activate; activate(); "
    code += f"import {module} as own; sys.exit(own.{call})"
    words = ["gpu", "--elements", "500", "--selected-from", "500", "--only", "ceilings", "kernels", "select", "cnn"]
    (ended,) = end_all([Program([sys.executable, "-c", code, *words])])
    assert shown in ended.stdout


def container(entries: dict[tuple[int, int], bytes]) -> bytes:
    """Code of a kind and for an architecture, as NVIDIA's linker stores it."""
    body = b""
    for (kind, architecture), code in entries.items():
        head = pack.ENTRY.pack(kind, 0x101, 64, len(code))
        body += head.ljust(pack.ARCHITECTURE_AT, b"\0") + architecture.to_bytes(4, "little") + bytes(32) + code
    return pack.CONTAINER.pack(pack.MAGIC, 1, pack.CONTAINER.size, len(body)) + body


def test_a_packed_library_keeps_the_code_of_its_architectures_and_still_loads(tmp_path):
    linked = container({(2, 80): b"old" * 8, (2, 90): b"wanted" * 4, (1, 90): b"PTX text" * 4, (2, 100): b"new" * 8})
    values = ", ".join(map(str, linked))
    source = "int answer() { return 42; }\n" + "".join(
        f'const unsigned char array_{i}[] __attribute__((section("{section}"), used)) = {{{values}}};\n'
        for i, section in enumerate((pack.LINKED, pack.RELOCATABLE, "other"))
    )
    command = [build._tool("c++"), "-g", "-shared", "-fPIC", "-xc", "-", "-o", str(tmp_path / "whole.so")]
    subprocess.run(command, input=source, text=True, check=True)
    whole = (tmp_path / "whole.so").read_bytes()
    library = bytearray(whole)
    pack.cut(library, [90])
    found = {name: bytes(library[start : start + size]) for name, start, size in pack.sections(library)}
    assert found[pack.LINKED] == container({(2, 90): b"wanted" * 4}).ljust(len(linked), b"\0")
    assert found[pack.RELOCATABLE] == container({}).ljust(len(linked), b"\0")
    assert found["other"] == linked
    assert not any(found[".debug_info"] + found[".strtab"])
    assert len(library) == len(whole)
    (tmp_path / "cut.so").write_bytes(library)
    assert ctypes.CDLL(str(tmp_path / "cut.so")).answer() == 42
    whole = bytearray(whole.replace(linked, linked[:4] + b"\2" + linked[5:]))  # a version that is not known
    with pytest.raises(ValueError, match="unknown form"):
        pack.cut(whole, [90])
