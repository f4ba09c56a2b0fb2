"""Atomic writes under exceptions, kills and concurrent writers; files of arrays under damage."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from distopt.errors import StateError, UsageError
from distopt.files import arrays_in, atomic_write, file_lock, load_arrays, save_arrays
from tests.unit.refusals import refused

OLD, NEW = b"old" * 1000, b"new!" * 100_003

# Kills itself at the given call: before it, or after it has taken effect.
KILLED_WRITER = """
import os, pathlib, signal, sys
from distopt import files
path, where, when = sys.argv[1:]
def fatal(call):
    def wrapper(*args, **kwargs):
        result = call(*args, **kwargs) if when == "after" else None
        os.kill(os.getpid(), signal.SIGKILL)
    return wrapper
module, _, name = where.partition(".")
owner = {"os": os, "fcntl": files.fcntl, "path": pathlib.Path}.get(module)
if owner:
    setattr(owner, name, fatal(getattr(owner, name)))
new = b"new!" * 100_003
with files.atomic_write(path) as file:
    for i in range(0, len(new), 65536):
        if where == "body" and i > 200_000:
            os.kill(os.getpid(), signal.SIGKILL)
        file.write(new[i:i + 65536])
"""

LOCK_HOLDER = """
import sys, time
from distopt.files import file_lock
with file_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def write(path, content=NEW, fault=None):
    with atomic_write(path) as file:
        file.write(content)
        if fault:
            raise fault


def test_an_error_before_in_or_after_the_body_keeps_the_old_file_and_leaves_nothing(tmp_path):
    path, folder = tmp_path / "a.bin", tmp_path / "folder"
    path.write_bytes(OLD)
    folder.mkdir()
    for error in (RuntimeError, KeyboardInterrupt, SystemExit) * 2:
        refused(error, "", write, path, fault=error)
        assert path.read_bytes() == OLD
        assert names(tmp_path) == ["a.bin", "folder"]
    refused(OSError, "", write, folder)
    assert names(tmp_path) == ["a.bin", "folder"]
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "none" / "a.bin"):
        pytest.fail("the body ran")


@pytest.mark.slow(kept=3, rest=4)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", ["body", "path.open", "fcntl.flock", "os.fstat", "os.fsync", "path.replace"])
def test_killed_writer_leaves_old_or_new_and_its_orphan_is_removed(tmp_path, where, when):
    path = tmp_path / "a.bin"
    path.write_bytes(OLD)
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, path, where, when], check=False)
    assert done.returncode == -signal.SIGKILL
    renamed = (where, when) == ("path.replace", "after")
    assert path.read_bytes() == (NEW if renamed else OLD)
    orphans = [name for name in names(tmp_path) if name != "a.bin"]
    assert len(orphans) == (0 if renamed or (where, when) == ("path.open", "before") else 1)
    assert all(name.startswith(".a.bin.") and name.endswith(".tmp") for name in orphans)
    write(path, b"next")
    assert path.read_bytes() == b"next"
    assert names(tmp_path) == ["a.bin"]


def test_cleaning_spares_other_files_and_writers_at_work(tmp_path):
    path = tmp_path / "a"
    orphan = ".a.0123456789abcdef.tmp"
    others = [".a.b.0123456789abcdef.tmp", ".a.tmp", ".a.0123.tmp", f"xa{orphan[2:]}", f"{orphan}~"]
    for name in others:
        (tmp_path / name).write_bytes(b"x")
    with atomic_write(path) as slow:
        slow.write(OLD)
        write(path)
        assert path.read_bytes() == NEW
    assert path.read_bytes() == OLD
    assert names(tmp_path) == sorted([*others, "a"])


def test_many_writers_at_once(tmp_path):
    path = tmp_path / "a.bin"

    def write_often(letter):
        for _ in range(20):
            write(path, letter * 50_001)

    seen = 0
    with ThreadPoolExecutor(6) as pool:
        writers = [pool.submit(write_often, bytes([65 + i])) for i in range(6)]
        while not all(writer.done() for writer in writers):
            if path.exists():
                content = path.read_bytes()
                assert content == content[:1] * 50_001
                seen += 1
    for writer in writers:
        writer.result()
    assert seen
    assert names(tmp_path) == ["a.bin"]


def test_symbolic_link_is_followed_and_the_umask_holds(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real" / "a.bin")
    before = os.umask(0o027)
    try:
        write(link)
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert names(tmp_path / "real") == ["a.bin"]
    assert link.stat().st_mode & 0o777 == 0o640


def test_lock_admits_one_at_a_time_and_ends_with_its_process(tmp_path):
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", LOCK_HOLDER, path], stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout.readline() == b"held\n"
        entered = threading.Event()

        def wait():
            with file_lock(path):
                entered.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not entered.wait(0.2)
        holder.kill()
        assert entered.wait(200)
        thread.join()
    for _ in range(2):
        with file_lock(path):
            pass
        with file_lock(path, wait=False), pytest.raises(BlockingIOError), file_lock(path, wait=False):
            pytest.fail("two hold the lock")


MARK = {"format": "test", "version": "2"}
TYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 5)]


def of_type(code, shape, byte_order="="):
    """Other values for each type and element."""
    values = np.arange(int(np.prod(shape))) * 37 % 101 + len(code)
    return values.reshape(shape).astype(np.dtype(code).newbyteorder(byte_order))


def test_arrays_of_all_types_and_shapes_are_those_of_safetensors(tmp_path):
    arrays = {f"{code} {shape}": of_type(code, shape) for code in TYPES for shape in SHAPES}
    arrays["big endian"] = of_type("f4", (5,), ">")
    arrays["strided"] = of_type("i4", (4, 6))[::2, ::-1]
    arrays["Fortran \u00e4"] = np.asfortranarray(of_type("f8", (3, 4)))
    path = tmp_path / "arrays"
    save_arrays(path, arrays, MARK, "notes, \u00e4")
    loaded, notes = load_arrays(path, MARK, "the test")
    for found in (safetensors.numpy.load_file(path), loaded):
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype.newbyteorder("=")
            np.testing.assert_array_equal(found[name], array)
    assert notes == "notes, \u00e4"
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    assert {key: metadata[key] for key in MARK} == MARK
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0, "arrays are not aligned"


def test_what_the_mark_is_for(tmp_path):
    path = tmp_path / "arrays"
    save_arrays(path, {"a": np.arange(3)}, MARK)
    assert load_arrays(path, MARK, "the test")[1] == ""
    refused(StateError, "arrays was not written by Someone", load_arrays, path, {**MARK, "format": "other"}, "Someone")
    said = rf"has version {MARK['version']} of its format, .* reads version 3"
    refused(StateError, said, load_arrays, path, {**MARK, "version": "3"}, "Someone")


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_refused(tmp_path_factory, content, with_length):
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(len(content).to_bytes(8, "little") + content if with_length else content)
    refused(StateError, str(path), load_arrays, path, MARK, "the test")


def test_types_of_others_and_offsets_that_do_not_fit_are_refused():
    def read(dtype: str, n_bytes: int):
        entry = {"dtype": dtype, "shape": [5, 3], "data_offsets": [0, n_bytes]}
        text = json.dumps({"__metadata__": MARK, "w": entry}).encode()
        return arrays_in(len(text).to_bytes(8, "little") + text + bytes(60), MARK, "the test")

    assert read("U32", 60)[0]["w"].tolist() == np.zeros((5, 3)).tolist()
    for dtype, n_bytes in (("F32", 59), ("BF16", 30), ("F8_E4M3", 15), ("C128", 1)):
        refused(StateError, "memory is truncated or not a file of states", read, dtype, n_bytes)


@pytest.mark.parametrize("array", [np.zeros(2, complex), np.zeros(2, np.longdouble), np.array(["text"])])
def test_types_without_a_name_are_refused_and_the_old_file_stays(tmp_path, array):
    path = tmp_path / "arrays"
    path.write_bytes(OLD)
    arrays = {"good": np.zeros(2), "bad": array}
    refused(UsageError, rf"bad has dtype {array.dtype}, which", save_arrays, path, arrays, MARK)
    assert path.read_bytes() == OLD
