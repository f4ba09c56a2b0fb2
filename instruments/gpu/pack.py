#!/usr/bin/env python3
"""Make wheels for a GPU machine without network: python instruments/gpu/pack.py FOLDER

FOLDER gets the wheels of distopt, of packages that it and its tests need beside NumPy and CuPy, and of NCCL. A tenth of
NCCL is left, without debugging symbols and the code for other architectures. Copy the folder there with the repository.
Then, with a Python that has CuPy:

    rm -r distopt    # the sources of that copy, which Python would find first
    pip install --no-index FOLDER/*.whl
    python instruments/gpu/first_gpu.py
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEST_TOOLS = ("hypothesis", "pytest", "pytest-timeout")

# Code for GPUs stands in containers: magic, version, bytes of the header, bytes that follow; so do the entries in them.
CONTAINER = struct.Struct("<IHHQ")
MAGIC = 0xBA55ED50
ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of the header, bytes that follow
ARCHITECTURE_AT = 28  # of an entry
KIND_ELF = 2
# Linked code, for the driver to load; and the objects it was linked from, of no use at run time.
LINKED, RELOCATABLE = ".nv_fatbin", "__nv_relfatbin"


def cut(library: bytearray, architectures: Sequence[int]) -> None:
    """Blank in place what a GPU of `architectures` does not need. No offset changes, so every address stays right."""
    for name, start, size in list(sections(library)):
        if name in {LINKED, RELOCATABLE}:
            wanted = set(architectures) if name == LINKED else set()
            for container, stop in containers(library, start, start + size):
                keep_entries(library, container, stop, wanted)
        elif name.startswith(".debug_") or name in {".symtab", ".strtab"}:
            library[start : start + size] = bytes(size)


def sections(library: bytearray) -> Iterator[tuple[str, int, int]]:
    """Name, offset and bytes of each section of an ELF file of 64 bits that has contents, but not that of the names."""
    if library[:5] != b"\x7fELF\x02":
        return
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_bytes, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + i * entry_bytes) for i in range(count)]
    for i, (name_at, kind, _, _, offset, size) in enumerate(headers):
        if i != names and kind not in {0, 8}:  # neither unused nor without contents
            begin = headers[names][4] + name_at
            yield library[begin : library.index(0, begin)].decode(), offset, size


def containers(library: bytearray, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each container between two offsets."""
    magic = struct.pack("<I", MAGIC)
    at = library.find(magic, start, end)
    while at >= 0:
        _, version, header_bytes, n_bytes = CONTAINER.unpack_from(library, at)
        stop = at + header_bytes + n_bytes
        if version != 1 or header_bytes != CONTAINER.size or stop > end:
            raise ValueError(f"the container at {at:#x} is of an unknown form; pack the library uncut (--whole)")
        yield at, stop
        at = library.find(magic, stop, end)


def keep_entries(library: bytearray, container: int, stop: int, wanted: set[int]) -> None:
    """Move the entries for `wanted` to the front of their container, and make it that much shorter."""
    kept, at = bytearray(), container + CONTAINER.size
    while at < stop:
        kind, _, header_bytes, n_bytes = ENTRY.unpack_from(library, at)
        (architecture,) = struct.unpack_from("<I", library, at + ARCHITECTURE_AT)
        if kind == KIND_ELF and architecture in wanted:
            kept += library[at : at + header_bytes + n_bytes]
        at += header_bytes + n_bytes
    library[container + CONTAINER.size : stop] = kept + bytes(stop - container - CONTAINER.size - len(kept))
    struct.pack_into("<Q", library, container + 8, len(kept))


def pack_wheel(source: Path, target: Path, architectures: Sequence[int]) -> None:
    """The wheel `source` with its libraries cut and compressed better, as `target`."""
    with zipfile.ZipFile(source) as wheel, zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as packed:
        for member in wheel.infolist():
            contents = bytearray(wheel.read(member))
            cut(contents, architectures)
            packed.writestr(member.filename, contents)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", type=int, nargs="+", default=[90], help="what NCCL keeps: 80, 90, 100 (%(default)s)")
    parser.add_argument("--python", default=sys.executable, help="of the version on that machine (this one)")
    parser.add_argument("--nccl", default="nvidia-nccl-cu13", help="its package (%(default)s)")
    options = parser.parse_args(argv)
    pip = [options.python, "-m", "pip"]
    subprocess.run([*pip, "wheel", "-w", str(options.folder), str(ROOT), *TEST_TOOLS], check=True)
    for wheel in options.folder.glob("numpy-*.whl"):  # CuPy was built for the one that is there
        wheel.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([*pip, "download", "--no-deps", "--only-binary=:all:", "-d", scratch, options.nccl], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        pack_wheel(wheel, options.folder / wheel.name, options.arch)


if __name__ == "__main__":
    main()
