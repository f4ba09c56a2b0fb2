"""MNIST from a given folder, the cache or the public mirrors, with generated digits as a substitute.

Every file is fully checked before use: the gzip CRC, the IDX header against the file's length, and the MD5 of the
content. Other data sets in MNIST's format are accepted if the number or size of their images differs from MNIST's.
Files with MNIST's shapes but other content, such as Fashion-MNIST, are treated as corrupt unless `verify=False`.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import io
import logging
import os
import stat
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from distopt.errors import DataError

from . import idx, synthetic

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["FILES", "MIRRORS", "Digits", "load"]

Kind: TypeAlias = Literal["mnist", "custom", "generated"]

# Name, shape and MD5 of the uncompressed content: training images and labels, test images and labels.
FILES: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("train-images-idx3-ubyte", (60000, 28, 28), "6bbc9ace898e44ae57da46a324031adb"),
    ("train-labels-idx1-ubyte", (60000,), "a25bea736e30d166cdddb491f175f624"),
    ("t10k-images-idx3-ubyte", (10000, 28, 28), "2646ac647ad5339dbf082846283269ea"),
    ("t10k-labels-idx1-ubyte", (10000,), "27ae3e4e09519cfbb04c329615203637"),
)
MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
SUBFOLDERS = ("", "mnist", "MNIST/raw")  # the last is torchvision's
# A mirror that takes longer to answer, or to send one file, gives way to the next.
CONNECT_SECONDS = 5.0
FILE_SECONDS = 120.0
MAX_DOWNLOAD_BYTES = 16 << 20  # the largest file is 10 MB
GENERATED_SEED = 20260101

log = logging.getLogger("distopt")


@dataclass(frozen=True)
class Digits:
    """Images of digits and their labels.

    Attributes:
        train_x: uint8 (N, 1, H, W), 0 is background.
        train_y: int32 (N,), 0 ... 9.
        test_x: as `train_x`.
        test_y: as `train_y`.
        kind: "mnist" (according to the checksums), "custom" or "generated".
        source: description of where the digits come from.
        fingerprint: hash of all of the arrays above.
    """

    train_x: NDArray[np.uint8]
    train_y: NDArray[np.int32]
    test_x: NDArray[np.uint8]
    test_y: NDArray[np.int32]
    kind: Kind
    source: str
    fingerprint: str

    @property
    def caveat(self) -> str:
        """The qualification of an accuracy: " (generated digits, not MNIST)"; empty if files were given."""
        return " (generated digits, not MNIST)" if self.kind == "generated" else ""


def load(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    verify: bool = True,
    rank: int = 0,
    exchange: Callable[[bytes], list[bytes]] | None = None,
) -> Digits:
    """Load MNIST. Local, or collective if `exchange` is given.

    1. `data_dir` or, if not given, `$DISTOPT_DATA_DIR`. If either is set, the folder or its subfolder `mnist` or
       `MNIST/raw` must hold the four files, gzipped or not, as `train-images-idx3-ubyte` or
       `train-images.idx3-ubyte`; no other source is tried.
    2. `~/.cache/distopt/mnist`. Missing or corrupt files are downloaded, by one process per host at a time.
    3. If neither the cache nor the mirrors have it: generated digits (`synthetic.digits`), with a warning from rank 0.

    Args:
        data_dir: folder with the files.
        verify: whether files with MNIST's shapes must have MNIST's content. The cache is always verified.
        rank: this rank.
        exchange: `Job.all_gather`. With it, ranks that found different digits (for example, because one host has no
            network connection) raise instead of training on a mixture.

    Raises:
        DataError: a given folder lacks a file, a file is corrupt, or the ranks found different digits.
    """
    folder = data_dir if data_dir is not None else os.environ.get("DISTOPT_DATA_DIR") or None
    digits = _from_folder(Path(folder), verify) if folder is not None else _from_cache_or_generated(rank)
    if exchange is not None:
        _compare(digits, exchange)
    return digits


def _compare(digits: Digits, exchange: Callable[[bytes], list[bytes]]) -> None:
    found = [answer.decode().split(" ", 1) for answer in exchange(f"{digits.fingerprint} {digits.source}".encode())]
    for rank, (fingerprint, source) in enumerate(found):
        if fingerprint != found[0][0]:
            raise DataError(
                f"rank 0 found {found[0][1]}, but rank {rank} found {source}; give all ranks the same files with "
                "data_dir or DISTOPT_DATA_DIR"
            )


# -- a folder ----------------------------------------------------------------------------------------------------------
def _from_folder(folder: Path, verify: bool) -> Digits:
    paths: list[Path] = []
    for name, _, _ in FILES:
        path = next((path for sub in SUBFOLDERS if (path := _find(folder / sub, name))), None)
        if path is None:
            raise DataError(
                f"{folder} has no file {name} or {name}.gz; put the four MNIST files there, or name no folder "
                "to have them downloaded"
            )
        paths.append(path)
    return _from_files(paths, verify)


def _from_files(paths: list[Path], verify: bool) -> Digits:
    arrays = [idx.read(path) for path in paths]
    sums = [_md5(array) for array in arrays]
    if verify:
        for path, array, found, (_, shape, md5) in zip(paths, arrays, sums, FILES, strict=True):
            if array.shape == shape and found != md5:
                raise DataError(
                    f"{path}: MD5 {found} is not MNIST's {md5}; replace the file by a fresh copy, or pass "
                    "verify=False if it is another data set of the same size"
                )
    _check_digits(arrays, paths)
    genuine = sums == [md5 for _, _, md5 in FILES]
    source = f"{'MNIST' if genuine else 'a custom data set'} in {paths[0].parent}"
    return _digits(arrays, sums, "mnist" if genuine else "custom", source)


def _find(folder: Path, name: str) -> Path | None:
    dotted = name.replace("-idx", ".idx")
    candidates = (folder / f"{stem}{suffix}" for suffix in ("", ".gz") for stem in (name, dotted))
    return next((path for path in candidates if _is_file(path)), None)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # a folder that this user may not enter, for example
        raise DataError(f"{path}: {error.strerror or error}; check the path and its permissions") from error


def _check_digits(arrays: list[NDArray[Any]], paths: list[Path]) -> None:
    """Check that these are images of one size, each with a label."""
    for images, labels, path_x, path_y in zip(arrays[::2], arrays[1::2], paths[::2], paths[1::2], strict=True):
        if images.ndim != 3 or images.dtype != np.uint8 or images.shape[1:] != arrays[0].shape[1:]:
            raise DataError(
                f"{path_x}: holds {images.dtype} {images.shape}, not uint8 images (N, H, W) of one size in training "
                "and test; replace it by a file of digits"
            )
        if labels.shape != images.shape[:1] or labels.dtype != np.uint8 or labels.max() > 9:
            raise DataError(
                f"{path_y}: holds {labels.dtype} {labels.shape} up to {labels.max()}, not one uint8 label 0 ... 9 for "
                f"each of the {len(images)} images; replace it by the labels of {path_x.name}"
            )


def _digits(arrays: list[NDArray[Any]], sums: list[str], kind: Kind, source: str) -> Digits:
    train_x, train_y, test_x, test_y = arrays
    fingerprint = hashlib.sha256(" ".join(sums).encode()).hexdigest()
    return Digits(
        train_x[:, None], train_y.astype(np.int32), test_x[:, None], test_y.astype(np.int32), kind, source, fingerprint
    )


def _md5(array: NDArray[Any]) -> str:
    """MD5 of the uncompressed IDX file that holds `array`, a byte array (other types are never compared)."""
    digest = hashlib.md5(idx.header(array), usedforsecurity=False)
    digest.update(array.data)
    return digest.hexdigest()


# -- the cache and the network -----------------------------------------------------------------------------------------
def _from_cache_or_generated(rank: int) -> Digits:
    try:
        folder = Path.home() / ".cache" / "distopt" / "mnist"
        return _from_cache(folder)
    except (DataError, OSError, RuntimeError) as error:  # RuntimeError: no home folder
        log.log(
            logging.WARNING if rank == 0 else logging.INFO,
            "MNIST is not in the cache and cannot be downloaded (%s): training on generated digits instead; "
            "set DISTOPT_DATA_DIR to a folder with the files to train on MNIST",
            error,
        )
    arrays: list[NDArray[Any]] = []
    for _, (count, *_), _ in FILES[::2]:
        images, labels = synthetic.digits(count, GENERATED_SEED + len(arrays))
        arrays += [images[:, 0], labels]
    return _digits(arrays, [_md5(array) for array in arrays], "generated", "generated digits")


def _from_cache(folder: Path) -> Digits:
    try:
        digits = _from_folder(folder, verify=True)
    except DataError:  # missing and corrupt files are reported when they are downloaded
        digits = None
    if digits is None or digits.kind != "mnist":
        folder.mkdir(parents=True, exist_ok=True)
        _fill(folder)
        digits = _from_files([folder / f"{name}.gz" for name, _, _ in FILES], verify=True)
    return digits


def _fill(folder: Path) -> None:
    """Download missing files into the cache, unless another process of this host does so or has just failed to."""
    lock = folder / "lock"
    before = lock.stat().st_mtime_ns if lock.exists() else 0
    with lock.open("ab") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)  # until the file is closed, or this process dies
        lacking = _lacking(folder)
        # Without a network, each rank that waited for the lock would otherwise wait for the same timeouts again.
        if lacking and lock.stat().st_mtime_ns != before and (reason := lock.read_text()):
            raise DataError(reason)
        try:
            for name, md5 in lacking:
                content = _download(name, md5)
                part = folder / f"{name}.gz.part"
                part.write_bytes(content)
                part.replace(folder / f"{name}.gz")
        except (DataError, OSError) as error:
            lock.write_text(str(error))
            raise


def _lacking(folder: Path) -> list[tuple[str, str]]:
    """Name and MD5 of the files that are missing or incomplete in the cache."""
    lacking: list[tuple[str, str]] = []
    for name, _, md5 in FILES:
        path = folder / f"{name}.gz"
        try:
            if path.exists() and _md5(idx.read(path)) == md5:
                continue
        except DataError:
            pass
        if path.exists():
            log.warning("%s is corrupt and will be downloaded anew", path)
        lacking.append((name, md5))
    return lacking


def _download(name: str, md5: str) -> bytes:
    """The gzipped file from the first mirror that has it intact."""
    reasons: list[str] = []
    for mirror in MIRRORS:
        url = f"{mirror}{name}.gz"
        try:
            content = _fetch(url)
            found = _md5(idx.decode(io.BytesIO(content), len(content), url))
        except (OSError, http.client.HTTPException, DataError) as error:
            reasons.append(str(error) if isinstance(error, DataError) else f"{url}: {error or type(error).__name__}")
            continue
        if found == md5:
            log.info("downloaded %s", url)
            return content
        reasons.append(f"{url}: MD5 {found} is not {md5}")
    raise DataError("; ".join(reasons))


def _fetch(url: str) -> bytes:
    deadline = time.monotonic() + FILE_SECONDS
    content = bytearray()
    with urllib.request.urlopen(url, timeout=CONNECT_SECONDS) as answer:
        while chunk := answer.read1(1 << 16):  # read would wait until it has all of these bytes
            content += chunk
            if len(content) > MAX_DOWNLOAD_BYTES:
                raise DataError(f"{url}: more than {MAX_DOWNLOAD_BYTES} bytes; this is not MNIST")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not finished within {FILE_SECONDS:g} s")
    return bytes(content)
