"""Files of states under damage and SIGKILL: all of the old content, all of the new, or an error and no change."""

import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from distopt import layer, model
from distopt.errors import StateError
from distopt.nn.core.tensor import Tensor


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = layer.Linear(3)
        self.norm = layer.BatchNorm2d(1)

    def forward(self, x):
        return self.linear(x)


def new_net(inputs: int = 5) -> Net:
    net = Net()
    net.norm(Tensor((1, 1, 2, 2)))
    net.compile([Tensor((1, inputs))], is_train=True)
    return net


def fill(net: Net, value: float) -> None:
    for tensor in net.get_states().values():
        tensor.array.fill(value)


def values(net: Net) -> dict[str, np.ndarray]:
    return {name: tensor.to_numpy() for name, tensor in net.get_states().items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("states") / "whole"
    net = new_net()
    net.linear.W.array[...] = np.arange(15).reshape(5, 3)
    net.save_states(path, {"epoch": 3, "order": np.arange(4)})
    return path.read_bytes()


def assert_refused(content: bytes, folder) -> None:
    """Loading `content` raises a StateError and changes nothing."""
    path = folder / "damaged"
    path.write_bytes(content)
    net = new_net()
    before = values(net)
    with pytest.raises(StateError, match=str(path)):
        net.load_states(path)
    for name, array in values(net).items():
        np.testing.assert_array_equal(array, before[name])


def test_the_whole_file_is_read(whole, tmp_path):
    (tmp_path / "whole").write_bytes(whole)
    net = new_net()
    assert net.load_states(tmp_path / "whole")["epoch"].item() == 3
    assert net.linear.W.array[4, 2] == 14
    with pytest.raises(FileNotFoundError):
        net.load_states(tmp_path / "absent")


@pytest.mark.slow
def test_every_truncation_is_refused(whole, tmp_path):
    for length in range(len(whole)):
        assert_refused(whole[:length], tmp_path)


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(whole, tmp_path_factory, place, bit):
    damaged = bytearray(whole)
    damaged[place % len(whole)] ^= 1 << bit
    assert_refused(bytes(damaged), tmp_path_factory.getbasetemp())


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_refused(tmp_path_factory, content, with_length):
    if with_length:
        content = len(content).to_bytes(8, "little") + content
    assert_refused(content, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize(("dtype", "n_bytes"), [("F32", 60), ("U32", 60), ("BF16", 30), ("F8_E4M3", 15), ("C128", 1)])
def test_foreign_files_are_refused(tmp_path, dtype, n_bytes):
    entry = {"dtype": dtype, "shape": [5, 3], "data_offsets": [0, n_bytes]}
    metadata = {"format": "distopt states", "version": "1"}
    header = json.dumps({"__metadata__": metadata, "model/linear.W": entry}).encode()
    assert_refused(len(header).to_bytes(8, "little") + header + bytes(n_bytes), tmp_path)


def test_files_of_others_are_refused(tmp_path):
    assert_refused(safetensors.numpy.save(values(new_net())), tmp_path)


def without(net: Net, name: str) -> Net:
    delattr(net, name)
    return net


@pytest.mark.parametrize("other", [lambda: new_net(inputs=6), lambda: without(new_net(), "norm")])
def test_states_of_another_model_are_refused(tmp_path, other):
    other().save_states(tmp_path / "other")
    assert_refused((tmp_path / "other").read_bytes(), tmp_path)
