"""The digits of the examples: the IDX reader, shifts, and generated digits."""

import gzip
import hashlib
import io
import resource
import struct

import numpy as np
import pytest

from distopt.errors import DataError, UsageError
from examples.data import idx
from examples.data.augment import MEAN, STD, normalize, random_shift
from examples.data.synthetic import digits
from tests.unit.refusals import refused


def array_of(dtype, shape):
    return (np.arange(np.prod(shape)) * 37 - 50).astype(dtype).reshape(shape)


def decode(data):
    return idx.decode(io.BytesIO(data), len(data), "x.idx")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(1,), (257,), (3, 5), (2, 3, 28, 1), (1,) * 32])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "float32", "float64"])
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


def test_digits_have_the_same_bits_on_every_machine_in_the_published_layout():
    content = bytes.fromhex("00000b02 00000002 00000003 0001 0002 0003 fffc 0005 7fff")
    expected = np.array([[1, 2, 3], [-4, 5, 32767]], np.int16)
    np.testing.assert_array_equal(decode(content), expected)
    assert idx.encode(expected) == idx.encode(expected.astype(">i2")) == content
    assert idx.encode(np.asfortranarray(expected)) == content
    for _ in range(2):
        images, labels = digits(600, 7)
        content = images.tobytes() + labels.astype("<i4").tobytes()
        assert hashlib.md5(content).hexdigest() == "355827ba4af9648f15b23453bcc86827"


def test_every_truncation_is_an_error():
    whole = idx.encode(array_of("int16", (3, 4)))
    for content in (whole, gzip.compress(whole)):
        for length in range(len(content)):
            refused(DataError, r"x\.idx: .*; replace the file", decode, content[:length])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"<html>not found</html>", "not an IDX file"),
        *((struct.pack(">HBBI", *head, 1, 1) + b"x", "not an IDX file") for head in ((1, 8), (0, 0x0A))),
        *((struct.pack(f">HBB{n}I", 0, 8, n, *[1] * n) + b"x", "not an IDX file") for n in (0, 33)),
        (struct.pack(">HBB3I", 0, 8, 3, 0, 2**32 - 1, 2**32 - 1), "header states"),
        (struct.pack(">HBB2I", 0, 0x0E, 2, 2**31, 2**30) + b"x" * 99, "header states"),  # 2**64 bytes: 0 if wrapped
        (struct.pack(">HBBI", 0, 8, 1, 3) + b"abcd", "more bytes"),
    ],
)
def test_each_fault_is_named(content, fact, packed):
    refused(DataError, fact, lambda: decode(gzip.compress(content) if packed else content))


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.symlink_to(path)])
def test_unreadable_path_is_a_data_error(tmp_path, make):
    path = tmp_path / "train.idx"
    make(path)
    refused(DataError, r"train\.idx: .*check the path", idx.read, path)


def test_a_gzip_bomb_is_refused_before_it_is_unpacked():
    """Its header is honest: so many zeros do come out of 1 MB."""
    wanted = idx.MAX_UNPACKED_BYTES + (1 << 20)
    zeros = gzip.compress(bytes(1 << 20))  # one member of many
    data = gzip.compress(struct.pack(">HBBI", 0, 8, 1, wanted)) + zeros * (wanted >> 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(DataError, rf"unpacks to {wanted} bytes; gzipped files are read up to 1073741824 bytes", decode, data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def images(count, channels=1, height=7, width=5):
    values = np.arange(count * channels * height * width) * 73 % 255 + 1  # never 0, so background is recognised
    return values.astype(np.uint8).reshape(count, channels, height, width)


def shifted(image, down, right):
    _, height, width = image.shape
    frame = np.pad(image, ((0, 0), (2, 2), (2, 2)))
    return frame[:, 2 - down : 2 - down + height, 2 - right : 2 - right + width]


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
    if not pixels:
        for mean, std in ((MEAN, STD), (0.0, 1.0)):
            for result in (normalize(x, mean=mean, std=std), normalize(x, again, mean=mean, std=std)):
                assert result.dtype == np.float32
                np.testing.assert_allclose(result, normalized(x, mean, std), rtol=1e-5, atol=1e-6)
        assert normalize(x, out) is out


ROOM = np.zeros((2, 1, 7, 5), np.float32)


def shift(x, out, pixels):
    random_shift(x, out, np.random.default_rng(0), pixels)


@pytest.mark.parametrize(
    ("match", "call", "arguments"),
    [
        *(("IDX cannot hold", idx.encode, [np.zeros(3, dtype)]) for dtype in (np.uint16, bool)),
        *(("IDX cannot hold", idx.encode, [np.zeros(shape, np.uint8)]) for shape in ((), (2, 0))),
        ("; give ", shift, [images(2), ROOM.astype(float), 2]),
        ("; give ", shift, [images(2), np.empty((3, 1, 7, 5), np.float32), 2]),
        ("; give ", shift, [images(2)[:, 0], ROOM[:, 0], 2]),
        ("; give ", shift, [images(2), ROOM, -1]),
        *(("at least 0", digits, numbers) for numbers in ([-1, 0], [1, -1])),
    ],
)
def test_arguments_that_make_no_sense_are_refused(match, call, arguments):
    refused(UsageError, match, call, *arguments)
