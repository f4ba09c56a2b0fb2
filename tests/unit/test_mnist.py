"""Where MNIST comes from, and that nothing broken is taken for whole. A tiny data set plays MNIST's part."""

import gzip
import hashlib
import io
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from distopt.errors import DataError
from examples.data import idx, mnist
from tests.unit.refusals import refused

REAL = os.environ.get("DISTOPT_DATA_DIR")


def tiny(name, shape):
    values = np.arange(np.prod(shape)) * 7 + len(name) + shape[0]
    return (values % (256 if len(shape) == 3 else 10)).astype(np.uint8).reshape(shape)


SHAPES = ((6, 4, 3), (6,), (5, 4, 3), (5,))
ARRAYS = {name: tiny(name, shape) for (name, _, _), shape in zip(mnist.FILES, SHAPES, strict=True)}
CONTENT = {name: idx.encode(array) for name, array in ARRAYS.items()}
TINY_FILES = tuple((name, ARRAYS[name].shape, hashlib.md5(data).hexdigest()) for name, data in CONTENT.items())
NAMES = list(CONTENT)


class Network:
    """In place of urlopen: answers by URL, or raises what stands there; the addresses asked for are kept."""

    def __init__(self):
        self.answers, self.asked = {}, []

    def __call__(self, url, timeout):
        assert 0 < timeout <= 10
        self.asked.append(url)
        answer = self.answers.get(url, urllib.error.URLError("no such host"))
        if isinstance(answer, Exception):
            raise answer
        return io.BytesIO(answer)


def served(mirror=0):
    return {f"{mnist.MIRRORS[mirror]}{name}.gz": gzip.compress(data, mtime=0) for name, data in CONTENT.items()}


@pytest.fixture(autouse=True)
def network(monkeypatch, tmp_path):
    """Nothing in the environment, an empty home, no network."""
    monkeypatch.delenv("DISTOPT_DATA_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(mnist, "FILES", TINY_FILES)
    network = Network()
    network.cache = tmp_path / "home" / ".cache" / "distopt" / "mnist"
    monkeypatch.setattr(mnist.urllib.request, "urlopen", network)
    return network


def put(folder, content=CONTENT, rename=lambda name: name):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        target = folder / rename(name)
        target.write_bytes(gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)
    return folder


def check(digits):
    assert digits.kind == "mnist"
    for name, array in zip(NAMES, (digits.train_x, digits.train_y, digits.test_x, digits.test_y), strict=True):
        images = "images" in name
        assert array.dtype == (np.uint8 if images else np.int32)
        np.testing.assert_array_equal(array, ARRAYS[name][:, None] if images else ARRAYS[name])


@pytest.mark.parametrize("subfolder", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("mark", ["-idx", ".idx"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_usual_names_are_found(tmp_path, monkeypatch, network, mark, suffix, subfolder):
    folder = tmp_path / "data"
    put(folder / subfolder, rename=lambda name: name.replace("-idx", mark) + suffix)
    check(mnist.load(folder))
    monkeypatch.setenv("DISTOPT_DATA_DIR", str(folder))
    digits = mnist.load()
    check(digits)
    assert str(folder) in digits.source
    assert not network.asked


def test_argument_comes_before_variable_before_cache(tmp_path, monkeypatch, network):
    put(network.cache)
    named, variable = put(tmp_path / "named"), put(tmp_path / "variable")
    assert (mnist.load().source, mnist.load().caveat) == (f"MNIST in {network.cache}", "")
    monkeypatch.setenv("DISTOPT_DATA_DIR", str(variable))
    assert mnist.load().source == f"MNIST in {variable}"
    assert mnist.load(named).source == f"MNIST in {named}"


@pytest.mark.parametrize("lost", NAMES)
def test_named_folder_that_lacks_a_file_is_an_error(tmp_path, monkeypatch, network, lost):
    network.answers = served()
    folder = put(tmp_path / "data", {name: data for name, data in CONTENT.items() if name != lost})
    monkeypatch.setenv("DISTOPT_DATA_DIR", str(folder))
    for named in (None, folder):
        refused(DataError, f"{folder} has no file {lost}", mnist.load, named)
    assert not network.asked


def test_other_content_is_an_error_unless_allowed_and_another_size_is_welcome(tmp_path):
    images = ARRAYS[NAMES[0]].copy()
    images[2, 1, 0] ^= 4
    folder = put(tmp_path / "data", CONTENT | {NAMES[0]: idx.encode(images)})
    refused(DataError, r"train-images-idx3-ubyte: MD5 .* fresh copy, or pass verify=False", mnist.load, folder)
    digits = mnist.load(folder, verify=False)
    assert digits.kind == "custom"
    np.testing.assert_array_equal(digits.train_x[:, 0], images)
    arrays = np.ones((3, 5, 5)), np.array([9, 0, 1]), np.zeros((1, 5, 5)), np.array([3])
    custom = {name: idx.encode(array.astype("u1")) for name, array in zip(NAMES, arrays, strict=True)}
    digits = mnist.load(put(tmp_path / "data", custom))
    assert (digits.kind, digits.source) == ("custom", f"a custom data set in {tmp_path / 'data'}")
    assert (digits.train_x.shape, digits.train_y.tolist()) == ((3, 1, 5, 5), [9, 0, 1])


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    ("index", "array", "fact"),
    [
        (0, np.zeros((6, 12), np.uint8), r"train-images.*holds uint8 \(6, 12\), not uint8 images"),
        (0, np.zeros((6, 4, 3), np.float32), "train-images.*holds float32"),
        (2, np.zeros((5, 4, 4), np.uint8), "t10k-images.*of one size"),
        (1, np.zeros(7, np.uint8), r"train-labels.*holds uint8 \(7,\)"),
        (3, np.full(5, 10, np.uint8), "t10k-labels.*up to 10"),
        (3, np.zeros(5, np.int32), "t10k-labels.*holds int32"),
    ],
)
def test_what_are_not_digits_is_an_error(tmp_path, monkeypatch, index, array, fact, verify):
    monkeypatch.setattr(mnist, "FILES", tuple((name, (60000,), md5) for name, _, md5 in TINY_FILES))
    folder = put(tmp_path / "data", CONTENT | {NAMES[index]: idx.encode(array)})
    refused(DataError, f"{fact}.*; replace it", mnist.load, folder, verify=verify)


def test_download_fills_the_cache_once(network, caplog):
    network.answers = served()
    with caplog.at_level(logging.WARNING):
        check(mnist.load())
        assert network.asked == [f"{mnist.MIRRORS[0]}{name}.gz" for name in NAMES]
        check(mnist.load())
    assert len(network.asked) == 4
    assert sorted(path.name for path in network.cache.iterdir()) == sorted(["lock", *(f"{name}.gz" for name in NAMES)])
    assert not caplog.records


@pytest.mark.parametrize(
    "fault",
    [
        urllib.error.URLError("unreachable"),
        TimeoutError(),
        mnist.http.client.IncompleteRead(b"x"),
        b"",
        b"<html>log in to the hotel's network</html>",
        gzip.compress(CONTENT[NAMES[0]], mtime=0)[:-3],
        gzip.compress(idx.encode(ARRAYS[NAMES[0]] ^ 1), mtime=0),
        CONTENT[NAMES[0]] + b"x",
    ],
    ids=str,
)
def test_second_mirror_stands_in(network, fault):
    network.answers = served(1) | {f"{mnist.MIRRORS[0]}{name}.gz": fault for name in NAMES}
    check(mnist.load())
    assert len(network.asked) == 8


def test_endless_answers_are_cut_off(network, monkeypatch):
    url = f"{mnist.MIRRORS[0]}{NAMES[0]}.gz"
    network.answers = served() | {url: bytes(200_000)} | served(1)
    monkeypatch.setattr(mnist, "MAX_DOWNLOAD_BYTES", 100_000)
    refused(DataError, "more than 100000 bytes", mnist._fetch, url)
    monkeypatch.setattr(mnist, "FILE_SECONDS", -1.0)
    refused(TimeoutError, "not finished within", mnist._fetch, f"{mnist.MIRRORS[0]}{NAMES[1]}.gz")
    assert mnist.load().kind == "generated"


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: gzip.compress(b"other")])
@pytest.mark.parametrize("name", NAMES)
def test_damaged_cache_is_mended(network, caplog, name, damage):
    network.answers = served()
    path = put(network.cache, rename=lambda name: f"{name}.gz") / f"{name}.gz"
    path.write_bytes(damage(path.read_bytes()))
    check(mnist.load())
    assert network.asked == [f"{mnist.MIRRORS[0]}{name}.gz"]
    assert f"{path} is corrupt" in caplog.text
    check(mnist.load())
    assert len(network.asked) == 1


def test_offline_machine_gets_generated_digits_with_one_notice(network, caplog):
    first = mnist.load()
    about = "generated", "generated digits", " (generated digits, not MNIST)"
    assert (first.kind, first.source, first.caveat) == about
    assert [first.train_x.shape, first.test_x.shape] == [(6, 1, 28, 28), (5, 1, 28, 28)]
    assert (first.train_x[:5] != first.test_x).any()
    assert len(network.asked) == 2  # both mirrors, one file
    assert "no such host" in caplog.text
    assert "set DISTOPT_DATA_DIR" in caplog.text
    second = mnist.load(rank=1)
    assert len(caplog.records) == 1
    assert second.fingerprint == first.fingerprint


def test_one_process_per_host_downloads(network, monkeypatch):
    """Threads stand for processes: the lock belongs to an open file."""
    network.answers, together = served(), threading.Barrier(3)
    fetch = mnist._fetch
    monkeypatch.setattr(mnist, "_fetch", lambda url: time.sleep(0.05) or fetch(url))

    def load(_):
        together.wait(60.0)
        check(mnist.load())

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(load, range(3)))
    assert sorted(network.asked) == sorted(served())


def test_ranks_with_different_digits_are_named(tmp_path):
    folder, sent = put(tmp_path / "data"), []
    check(mnist.load(folder, exchange=lambda payload: sent.append(payload) or [payload] * 3))
    error = rf"rank 0 found MNIST in {folder}, but rank 2 found generated digits; give"
    for _ in range(2):
        refused(
            DataError, error, mnist.load, folder, exchange=lambda payload: [payload, payload, b"0123 generated digits"]
        )
    # The same content in another place is the same.
    copy = put(tmp_path / "copy", rename=lambda name: f"{name}.gz")
    check(mnist.load(copy, exchange=lambda payload: [sent[0], payload]))


@pytest.mark.skipif(not REAL, reason="DISTOPT_DATA_DIR is not set: real MNIST is not checked")
def test_real_mnist(monkeypatch):
    monkeypatch.undo()
    digits = mnist.load(REAL)
    assert digits.kind == "mnist"
    assert (digits.train_x.shape, digits.test_x.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert digits.train_y[:5].tolist() == [5, 0, 4, 1, 9]
    assert np.bincount(digits.test_y).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert abs(digits.train_x.mean() / 255 - 0.1307) < 1e-4
