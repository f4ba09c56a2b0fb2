"""The digits of the examples: the IDX reader, shifts, and generated digits."""

import gzip
import hashlib
import io
import resource
import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distopt.errors import DataError, UsageError
from examples.data import idx
from examples.data.augment import MEAN, STD, normalize, random_shift
from examples.data.synthetic import digits

DTYPES = ["uint8", "int8", "int16", "int32", "float32", "float64"]


def array_of(dtype, shape):
    values = np.arange(np.prod(shape)) * 37 - 50
    return values.astype(dtype).reshape(shape)


def decode(data):
    return idx.decode(io.BytesIO(data), len(data), "x.idx")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(1,), (257,), (3, 5), (2, 3, 28, 1), (1,) * 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(tmp_path, dtype, shape, packed):
    array = array_of(dtype, shape)
    content = idx.encode(array)
    path = tmp_path / "name-says-nothing"
    path.write_bytes(gzip.compress(content) if packed else content)
    for _ in range(2):
        back = idx.read(path)
        assert back.dtype == array.dtype
        assert back.dtype.isnative
        assert back.flags.writeable
        np.testing.assert_array_equal(back, array)


def test_layout_is_the_published_one():
    content = bytes.fromhex("00000b02 00000002 00000003 0001 0002 0003 fffc 0005 7fff")
    expected = np.array([[1, 2, 3], [-4, 5, 32767]], np.int16)
    np.testing.assert_array_equal(decode(content), expected)
    assert idx.encode(expected) == content
    assert idx.encode(expected.astype(">i2")) == content
    assert idx.encode(np.asfortranarray(expected)) == content


@pytest.mark.parametrize("packed", [False, True])
def test_every_truncation_is_an_error(packed):
    content = idx.encode(array_of("int16", (3, 4)))
    content = gzip.compress(content) if packed else content
    for length in range(len(content)):
        with pytest.raises(DataError, match=r"x\.idx: .*; replace the file"):
            decode(content[:length])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"<html>not found</html>", "not an IDX file"),
        (struct.pack(">HBBI", 1, 8, 1, 1) + b"x", "not an IDX file"),
        (struct.pack(">HBBI", 0, 0x0A, 1, 1) + b"x", "not an IDX file"),
        (struct.pack(">HBB", 0, 8, 0) + b"x", "not an IDX file"),
        (struct.pack(">HBB33I", 0, 8, 33, *[1] * 33) + b"x", "not an IDX file"),
        (struct.pack(">HBB3I", 0, 8, 3, 0, 2**32 - 1, 2**32 - 1), "header states"),
        (struct.pack(">HBB2I", 0, 0x0E, 2, 2**31, 2**30) + b"x" * 99, "header states"),  # 2**64 bytes: 0 if wrapped
        (struct.pack(">HBBI", 0, 8, 1, 3) + b"abcd", "more bytes"),
    ],
)
def test_each_fault_is_named(content, fact, packed):
    with pytest.raises(DataError, match=fact):
        decode(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.symlink_to(path)])
def test_unreadable_path_is_a_data_error(tmp_path, make):
    path = tmp_path / "train.idx"
    make(path)
    with pytest.raises(DataError, match=r"train\.idx: .*check the path"):
        idx.read(path)


@pytest.mark.parametrize(
    "array", [np.zeros(3, np.uint16), np.zeros(3, bool), np.float32(1), np.zeros((2, 0), np.uint8)]
)
def test_what_the_format_cannot_hold_is_refused(array):
    with pytest.raises(UsageError, match="IDX cannot hold"):
        idx.encode(np.asarray(array))


@given(st.binary(max_size=200), st.booleans(), st.booleans())
@example(b"\x1f\x8b", False, False)
def test_any_bytes_give_an_array_or_a_data_error(data, packed, with_header):
    if with_header:
        data = struct.pack(">HB", 0, sorted(idx.TYPES)[len(data) % 6]) + data
    content = gzip.compress(data) if packed else data
    try:
        array = decode(content)
    except DataError:
        return
    assert idx.encode(array) == data


def test_a_gzip_bomb_is_refused_before_it_is_unpacked():
    """Its header is honest: so many zeros do come out of 1 MB."""
    wanted = idx.MAX_UNPACKED_BYTES + (1 << 20)
    zeros = gzip.compress(bytes(1 << 20))  # one member of many
    data = gzip.compress(struct.pack(">HBBI", 0, 8, 1, wanted)) + zeros * (wanted >> 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=rf"unpacks to {wanted} bytes; gzipped files are read up to 1073741824 bytes"):
        decode(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


# -- shifts: the right pixels, all shifts, no mirror images ------------------------------------------------------------
def images(count, channels=1, height=7, width=5):
    values = np.arange(count * channels * height * width) * 73 % 255 + 1  # never 0, so background is recognised
    return values.astype(np.uint8).reshape(count, channels, height, width)


def shifted(image, down, right):
    result = np.zeros_like(image)
    _, height, width = image.shape
    for row in range(height):
        for column in range(width):
            if 0 <= row + down < height and 0 <= column + right < width:
                result[:, row + down, column + right] = image[:, row, column]
    return result


def normalized(x, mean=MEAN, std=STD):
    return (x / 255.0 - mean) / std


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("pixels", [0, 1, 2])
def test_each_image_is_a_shift_of_itself_and_all_shifts_occur(channels, pixels):
    x = images(200, channels)
    before = x.copy()
    out = np.full(x.shape, np.nan, np.float32)
    assert random_shift(x, out, np.random.default_rng(3), pixels) is out
    np.testing.assert_array_equal(x, before)
    again, generator = np.empty_like(out), np.random.default_rng(3)
    np.testing.assert_array_equal(random_shift(x, again, generator, pixels), out)
    assert (random_shift(x, again, generator, pixels) != out).any() == (pixels > 0)
    shifts = [(down, right) for down in range(-pixels, pixels + 1) for right in range(-pixels, pixels + 1)]
    seen = set()
    for image, result in zip(x, out, strict=True):
        matches = [
            shift for shift in shifts if np.allclose(result, normalized(shifted(image, *shift)), rtol=1e-5, atol=1e-5)
        ]
        assert len(matches) == 1
        seen.add(matches[0])
    assert seen == set(shifts)


@pytest.mark.parametrize("mean_std", [(MEAN, STD), (0.0, 1.0)])
def test_normalize(mean_std):
    mean, std = mean_std
    x = np.arange(256, dtype=np.uint8).reshape(2, 2, 8, 8)
    out = np.empty(x.shape, np.float32)
    for result in (normalize(x, mean=mean, std=std), normalize(x, out, mean=mean, std=std)):
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, normalized(x, mean, std), rtol=1e-5, atol=1e-6)
    assert normalize(x, out) is out


@pytest.mark.parametrize(
    ("x", "out", "pixels"),
    [
        (images(2), np.empty((2, 1, 7, 5)), 2),
        (images(2), np.empty((3, 1, 7, 5), np.float32), 2),
        (images(2)[:, 0], np.empty((2, 7, 5), np.float32), 2),
        (images(2), np.empty((2, 1, 7, 5), np.float32), -1),
    ],
)
def test_errors_of_shifts(x, out, pixels):
    with pytest.raises(UsageError, match="; give "):
        random_shift(x, out, np.random.default_rng(0), pixels)


# -- generated digits --------------------------------------------------------------------------------
def test_same_bits_on_every_machine():
    for _ in range(2):
        images, labels = digits(600, 7)
        content = images.tobytes() + labels.astype("<i4").tobytes()
        assert hashlib.md5(content).hexdigest() == "355827ba4af9648f15b23453bcc86827"


@pytest.mark.parametrize("arguments", [(-1, 0), (1, -1)])
def test_errors_of_digits(arguments):
    with pytest.raises(UsageError, match="at least 0"):
        digits(*arguments)
