#!/usr/bin/env python3
"""Pack what `first_gpu.py` needs on a machine without network or pip: python tests/gpu/pack.py FOLDER

FOLDER gets first_gpu.py, the tests, benchmarks and sources as repository.zip, distopt's wheel, and as many of the
packages that it uses as fit, in the order of `PACKAGES`. On that machine run `python3 first_gpu.py` in it.

Wheels are packed anew, with LZMA. Libraries in them lose debugging symbols and the code for other architectures, which
leaves a twentieth of NCCL. cuBLAS and NVRTC are larger than the limit, so the machine must have them; the
libraries of PyTorch will do if their folders are in LD_LIBRARY_PATH.
"""

from __future__ import annotations

import argparse
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("tests", "benchmarks", "examples", "csrc", "pyproject.toml")  # the emulator includes headers of csrc
TESTS = ("pytest", "pytest-timeout", "pluggy", "iniconfig", "packaging", "pygments", "hypothesis", "sortedcontainers")
PACKAGES = (
    "nvidia-nccl-cu13",
    *TESTS,
    *("threadpoolctl", "safetensors", "cuda-pathfinder", "numpy", "cupy-cuda13x"),
)
LIMIT_MIB = 55.0

NOT_LOADED = (".a", ".bc", ".ltoir", ".pyi")

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
    """The wheel `source` with libraries cut (unless `architectures` is empty) and compressed better, as `target`."""
    with zipfile.ZipFile(source) as wheel, zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as packed:
        for member in wheel.infolist():
            name = member.filename
            if name.endswith(("/", *NOT_LOADED)):
                continue
            contents = bytearray(wheel.read(member))
            if architectures:
                cut(contents, architectures)
            packed.writestr(name, contents)


def pack_repository(target: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *PARTS],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    with zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as archive:
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                archive.write(ROOT / name, name)


def build_wheel(python: str, folder: Path) -> Path:
    subprocess.run([python, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(ROOT)], check=True)
    return next(folder.glob("distopt_train-*.whl"))


def download(python: str, package: str, folder: Path) -> Path | None:
    """The wheel of `package` for that Python; None if the index has none."""
    folder.mkdir()
    command = [
        python,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(folder),
        package,
    ]
    subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
    return next(folder.glob("*.whl"), None)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--arch", type=int, nargs="+", default=[90], help="what packages keep: 80, 90, 100 (%(default)s)"
    )
    parser.add_argument("--whole", action="store_true", help="cut nothing")
    parser.add_argument("--python", default=sys.executable, help="of the version on that machine (this one)")
    parser.add_argument("--limit", type=float, default=LIMIT_MIB, metavar="MIB", help="of the folder (%(default)g)")
    parser.add_argument("--wheel", type=Path, help="distopt's wheel, instead of building it")
    parser.add_argument("--packages", nargs="*", default=PACKAGES, help="that are not on that machine")
    options = parser.parse_args(argv)
    folder, architectures = options.folder, [] if options.whole else options.arch
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "tests" / "gpu" / "first_gpu.py", folder)
    pack_repository(folder / "repository.zip")
    left_out = []
    with tempfile.TemporaryDirectory() as scratch:
        own = options.wheel or build_wheel(options.python, Path(scratch))
        pack_wheel(own, folder / own.name, [])
        for package in options.packages:
            wheel = download(options.python, package, Path(scratch, package))
            if wheel is None:
                left_out.append(f"{package} (no wheel for this Python)")
                continue
            target = folder / wheel.name
            pack_wheel(wheel, target, architectures)
            wheel.unlink()
            print(f"{target.stat().st_size / 2**20:7.1f} MiB  {target.name}", flush=True)
            if mebibytes(folder) > options.limit:
                left_out.append(f"{package} ({target.stat().st_size / 2**20:.1f} MiB more than fit)")
                target.unlink()
    print(f"{mebibytes(folder):7.1f} MiB  {folder}; left out: {', '.join(left_out) or 'nothing'}")
    return int(mebibytes(folder) > options.limit)


def mebibytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / 2**20


if __name__ == "__main__":
    sys.exit(main())
