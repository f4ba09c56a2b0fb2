"""`make first-gpu` where there is no GPU: parts that hang, crash or are missing, and what is packed for elsewhere."""

import json
import os
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.conformance.ranks import run_ranks
from tests.emulation import build
from tests.gpu import first_gpu, first_parts, pack, test_peers
from tests.gpu.first_gpu import Part

HANG = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
HANG += "print('| a | table |'); print('began', flush=True); time.sleep(600)"


def runs(tmp_path: Path, parts: tuple[Part, ...], facts: dict[str, str] | None = None, minutes: float = 1.0):
    rows = first_gpu.run_parts(parts, tmp_path, facts or {}, minutes, sys.executable, os.environ, "Head.")
    report = json.loads((tmp_path / "first-gpu.json").read_text())
    assert [row["result"] for row in report["parts"]] == [row.result for row in rows]
    return rows, (tmp_path / "first-gpu.md").read_text()


# -- parts -------------------------------------------------------------------------------------------------------------
def test_parts_that_hang_or_crash_do_not_keep_the_rest_from_running(tmp_path, capfd):
    parts = (
        Part("hangs", 1.5, ("-c", HANG), ()),
        Part("crashes", 20, ("-c", "import os; print('so far', flush=True); os.kill(os.getpid(), 11)"), ()),
        Part("fails", 20, ("-c", "print('wrong | sum'); raise SystemExit(3)"), ()),
        Part("skips", 20, ("-c", "print('no cuDNN'); raise SystemExit(77)"), ()),
        Part("cannot start", 20, ("-c", ""), (), before=("/nowhere/sanitizer",)),
        Part("passes", 20, ("-c", "print('| 1 | 2 |'); print('well')"), ()),
        Part("needs a GPU", 20, ("-c", ""), ("GPU", "NCCL 2.30")),
    )
    began = time.monotonic()
    rows, text = runs(tmp_path, parts, {"GPU": "no driver", "NCCL 2.30": "no driver"})
    assert time.monotonic() - began < 60
    assert [row.result for row in rows] == [
        *("stopped after 2 s", "crashed", "failed", "not run", "failed", "passed", "not run")
    ]
    assert [row.says for row in rows][1:4] == ["exit code -11, SIGSEGV: so far", "exit code 3: wrong | sum", "no cuDNN"]
    assert rows[0].says == "began"
    assert rows[6].says == "no driver"
    assert "| needs a GPU | not run | 0.0 | no driver |" in text
    assert "wrong / sum" in text
    assert "hangs:\n\n| a | table |" in text
    assert "passes:\n\n| 1 | 2 |" in text
    assert first_gpu.exit_code(rows) == 1
    assert capfd.readouterr().out.count("\n") == len(parts)
    ended = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "time.sleep(600)" not in ended, "what a part started ends with it"


def test_every_part_names_something_that_exists():
    for part in (first_gpu.VERSIONS, *first_gpu.WITHOUT_GPU, *first_gpu.ON_GPU):
        for word in part.arguments:
            assert not word.endswith(".py") or (first_gpu.HERE.parents[1] / word).exists(), word
        if "tests.gpu.first_parts" in part.arguments:
            assert part.arguments[-1] in first_parts.PARTS


@pytest.mark.slow
def test_this_machine_ends_with_what_it_lacks(tmp_path):
    if not first_gpu.missing(["GPU"], first_gpu.look_around({**os.environ, "PYTHONPATH": "."}, sys.executable)):
        pytest.skip("there is a GPU")
    command = [
        sys.executable,
        "tests/gpu/first_gpu.py",
        "--out",
        str(tmp_path),
        "--only",
        "versions",
        "NCCL",
        "ceilings",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=first_gpu.HERE.parents[1])
    assert ended.returncode == 77, ended.stdout + ended.stderr
    assert "no GPU can be used here: " in ended.stdout
    assert "3 not run, 1 passed" in ended.stdout
    assert "| ceilings | not run | 0.0 | " in (tmp_path / "first-gpu.md").read_text()


@pytest.mark.slow(kept=1)
# -- bodies, on the emulated GPU ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["kernel", "product", "plan", "kernels"])
def test_a_part_for_a_gpu(name):
    build.build()
    code = "from tests.emulation import activate; activate(); from tests.gpu.first_parts import PARTS, lacks; "
    code += f"assert not lacks()['GPU']; raise SystemExit(PARTS[{name!r}]())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_killed_peer():
    build.build()
    first, _ = run_ranks(test_peers.lose, 2, "killed", True, timeout=100.0)
    assert first.error is None, first.trace


# -- the pack ----------------------------------------------------------------------------------------------------------
def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 0x101, len(header), len(payload))
    struct.pack_into("<I", header, 28, architecture)
    return bytes(header) + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(**contents: bytes) -> bytearray:
    """An ELF file of 64 bits with these sections ("nv_fatbin" is ".nv_fatbin") and that of their names."""
    names = [f"__{name[2:]}" if name.startswith("__") else f".{name}" for name in contents] + [".shstrtab"]
    texts = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    file, headers = bytearray(b"\x7fELF\x02\x01\x01".ljust(64, b"\0")), [bytes(64)]
    for name, content in zip(names, [*contents.values(), texts], strict=True):
        place = texts.index(b"\0" + name.encode() + b"\0") + 1
        headers.append(struct.pack("<IIQQQQ", place, 1, 0, 0, len(file), len(content)).ljust(64, b"\0"))
        file += content
    struct.pack_into("<Q", file, 0x28, len(file))
    struct.pack_into("<HHH", file, 0x3A, 64, len(headers), len(headers) - 1)
    return file + b"".join(headers)


def test_only_code_for_the_architecture_stays_in_a_library():
    old, new, ptx = entry(2, 80, b"old" * 40), entry(2, 90, b"new" * 50), entry(1, 90, b"ptx" * 60)
    linked = container(old, new, ptx) + bytes(8) + container(old)
    before = library(
        text=b"code", nv_fatbin=linked, __nv_relfatbin=container(new), debug_info=b"debug", strtab=b"names"
    )
    after = bytearray(before)
    pack.cut(after, [90])
    assert len(after) == len(before)
    found = {name: bytes(after[start : start + size]) for name, start, size in pack.sections(after)}
    kept = container(new)
    assert found[".text"] == b"code"
    assert found[".nv_fatbin"][: len(kept)] == kept
    assert not any(found[".nv_fatbin"][len(kept) : len(linked) - len(container(old))])
    assert found[".nv_fatbin"][-len(container(old)) :] == container().ljust(len(container(old)), b"\0")
    assert found["__nv_relfatbin"] == container().ljust(len(container(new)), b"\0")
    assert not any(found[".debug_info"] + found[".strtab"])
    again = bytearray(after)
    pack.cut(again, [90])
    assert again == after


@pytest.mark.slow
def test_what_is_packed_runs_elsewhere(tmp_path):
    """With a package in place of distopt's wheel, as that is large: it is unpacked, and parts find it."""
    wheel = tmp_path / "distopt-0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("distopt/__init__.py", "")
        archive.writestr("distopt/__main__.py", "print('the one that was packed')")
        archive.writestr("distopt/_core.so", bytes(library(nv_fatbin=container(entry(2, 80, b"old")))))
    folder = tmp_path / "pack"
    assert pack.main([str(folder), "--wheel", str(wheel), "--packages"]) == 0
    python = str(Path(sys.base_prefix, "bin", "python3"))  # an editable install would come before what is unpacked
    command = [python, str(folder / "first_gpu.py"), "--out", str(tmp_path / "out"), "--only", "versions"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the one that was packed" in ended.stdout
    assert (tmp_path / "out" / "first-gpu.md").exists()
    with pytest.raises(SystemExit):
        pack.main([str(folder), "--packages"])
