"""Models: compiling, training, evaluation, saving and loading."""

import collections
import copy
import pickle

import numpy as np
import pytest
import safetensors.numpy

from distopt import autograd, device, layer, tensor
from distopt import opt as optim
from distopt.errors import StateError, UsageError
from distopt.launch.job.origin import origin
from distopt.nn.core.tensor import Tensor
from distopt.nn.model import Model
from tests.unit.nets import Chain, copies
from tests.unit.refusals import refused

NAMES = ["conv1.W", "conv1.b", "norm.scale", "norm.bias", "linear1.W", "linear1.b", "linear2.W", "linear2.b"]


class CNN(Chain):
    def __init__(self, hidden=9):
        super().__init__(
            conv1=layer.Conv2d(1, 4, 3, padding=0, activation="RELU"),
            norm=layer.BatchNorm2d(),
            pooling1=layer.MaxPool2d(2, 2, padding=0),
            flatten=layer.Flatten(),
            linear1=layer.Linear(hidden),
            relu=layer.ReLU(),
            dropout=layer.Dropout(0.3),
            linear2=layer.Linear(3),
        )


def batch(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x = Tensor((6, 1, 8, 8), device.get_default_device(), dtype)
    x.copy_from_numpy(rng.standard_normal(x.shape))
    return x, Tensor(data=rng.integers(0, 3, 6), dtype=tensor.int32)


def compiled(dtype=np.float32, seed=0, **options):
    device.get_default_device().SetRandSeed(seed)
    net = CNN(**options)
    net.set_optimizer(optim.SGD(lr=0.05, momentum=0.9))
    net.compile([batch(dtype=dtype)[0]], is_train=True, use_graph=False, sequential=False)
    return net


def test_compile_makes_and_names_parameters_and_layers_by_their_path():
    net = compiled()
    assert list(net.get_params()) == NAMES
    assert [p.name for p in net.get_params().values()] == NAMES
    assert (net.linear1.W.shape, net.linear1.W.creator) == ((36, 9), None)
    assert net.training
    assert autograd.training
    assert not net.norm.running_mean.array.any()

    class Heads(Model):
        def __init__(self):
            super().__init__()
            self.heads = [layer.Linear(2), layer.Linear(7, 2)]

        def forward(self, x):
            return self.heads[1](self.heads[0](x))

    refused(UsageError, r"heads\.1 expects 7 inputs, got 2", lambda: Heads().compile([Tensor((3, 5))]))


def test_evaluation_records_nothing_and_is_of_its_own_model():
    net = compiled()
    x, y = batch()
    net(x, y)
    moved = net.norm.running_mean.to_numpy()
    assert moved.any()
    net.eval()
    first, second = net(x), net(x)
    assert first.creator is None
    np.testing.assert_array_equal(first.array, second.array)
    np.testing.assert_array_equal(net.norm.running_mean.array, moved)
    net.train()
    other = compiled()
    other.eval()
    for _ in range(2):
        assert isinstance(net(x, y), tuple)
        assert other(x).creator is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_on_a_cpu_use_graph_is_remembered_switched_and_changes_nothing(caplog, dtype):
    results, cpu = [], device.get_default_device()
    for use_graph in ("False", "True"):
        net = compiled(dtype)
        net.set_optimizer(optim.Adam(lr=0.01))
        net.compile([batch(dtype=dtype)[0]], use_graph=use_graph, sequential=use_graph)
        assert cpu.graph_enabled() is (use_graph == "True")
        losses = [net(*batch(dtype=dtype))[1].item() for _ in range(30)]
        assert losses[-1] < 0.3 * losses[0]
        assert {value.dtype for value in net.get_states().values()} == {np.dtype(dtype)}
        results.append((losses, [p.to_numpy().tobytes() for p in net.get_states().values()]))
        assert not net.graph_replays
    cpu.EnableGraph(False)
    assert results[0] == results[1]
    assert not caplog.records
    net = CNN()
    refused(UsageError, r"CNN is not compiled; call compile\(inputs, use_graph", net.graph)
    net.compile([batch()[0]], use_graph=False)
    for enabled in (True, False):
        net.graph(enabled, sequential=enabled)
        assert cpu.graph_enabled() is enabled


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (batch()[0], {}, r"compile takes a list of inputs; write compile\(\[x\]\)"),
        ([], {}, r"compile takes a list of tensors, .*; got \[\]"),
        ([np.zeros((6, 1, 8, 8))], {}, r"compile takes a list of tensors, .*; got \['ndarray'\]"),
        (np.zeros((6, 1, 8, 8)), {}, "compile takes a list of tensors, .*; got ndarray"),
        ([batch()[0]], {"use_graph": "yes"}, "use_graph is True or False; got 'yes'"),
    ],
)
def test_arguments_of_compile_are_checked_before_anything_happens(inputs, options, message):
    net = CNN()
    refused(UsageError, message, net.compile, inputs, **options)
    assert not net.get_params()


def test_arguments_of_a_call_that_do_not_fit_are_explained():
    net = compiled()
    x, y = batch()
    refused(UsageError, r"CNN is in training mode, where it takes train_one_batch\(x, y\); or", net, x)
    for wrong in [(x.to_numpy(), y), (x, y.to_numpy())]:
        refused(UsageError, r"CNN takes tensors, got a NumPy array; make it one with tensor\.from", net, *wrong)
    net.eval()
    refused(TypeError, "positional argument", net)
    net.flatten = None
    refused(TypeError, "'NoneType' object is not callable", net, x)


def test_an_empty_batch_is_refused_in_training():
    net, x, y = compiled(), Tensor((0, 1, 8, 8)), Tensor((0,), dtype=np.int32)
    refused(UsageError, "CNN got an empty batch; leave it out, under DistOpt within join", net, x, y)
    net.eval()
    assert net(x).shape == (0, 3)


@pytest.mark.parametrize(("rank", "warns"), [(0, False), (1, True), (2, False)])
def test_ranks_that_train_apart_are_told_once(rank, warns, monkeypatch, caplog, untold):
    monkeypatch.setattr(origin, "invitation", (None, rank, 3))
    for _ in range(2):
        compiled()
    assert [record.message.partition(";")[0] for record in caplog.records] == (
        ["3 ranks train a CNN without DistOpt, each for itself"] if warns else []
    )


def test_a_model_in_print():
    net = Chain(body=layer.Linear(4, activation="RELU"), head=layer.Linear(3))
    assert str(net).splitlines() == [
        "Chain, 0 parameters, before compile",
        "  body Linear",
        "  head Linear",
        "  loss SoftMaxCrossEntropy",
    ]
    net.compile([Tensor((6, 5))])
    assert str(net).splitlines()[:3] == [
        "Chain, 39 parameters",
        "  body Linear: W [5, 4], b [4], 24 parameters",
        "  head Linear: W [4, 3], b [3], 15 parameters",
    ]
    assert str(net.head) == "Linear, 15 parameters"


def test_a_model_that_is_not_compiled_gives_its_output_to_scripts_that_walk_the_graph():
    net, (x, y) = CNN(), batch()
    autograd.training = True
    sgd = optim.SGD(lr=0.05)
    losses = []
    for _ in range(10):
        loss = autograd.softmax_cross_entropy(net(x), y)
        for param, grad in autograd.backward(loss):
            sgd.update(param, grad)
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    net.set_optimizer(sgd)
    out, loss = net(x, y)  # its arguments fit train_one_batch
    assert loss.item() < losses[0]
    assert net.forward(x).shape == out.shape


def test_a_model_may_make_its_layers_and_its_optimizer_itself():
    class Lazy(Model):
        def __init__(self):
            super().__init__()
            self.optimizer = optim.SGD(lr=0.1)

        def initialize(self, x):
            self.linear = layer.Linear(x.shape[1])

        def forward(self, x):
            return self.linear(x)

        def train_one_batch(self, x, y):
            loss = autograd.mse_loss(self.forward(x), y)
            self.optimizer(loss)
            return loss

    net = Lazy()
    x = tensor.from_numpy(np.arange(12, dtype=np.float32).reshape(4, 3) / 10)
    net.compile([tensor.PlaceHolder((4, 3))])
    assert [p.name for p in net.get_params().values()] == ["linear.W", "linear.b"]
    assert net(x, x * 2).item() > [net.train_one_batch(x, x * 2) for _ in range(5)][-1].item()


def test_what_is_missing_and_states_of_others_are_refused(tmp_path):
    net = CNN()
    for call in (net.save_states, net.load_states):
        refused(UsageError, "call compile before", call, tmp_path / "x")
    net.compile([batch()[0]])
    refused(UsageError, "CNN has no optimizer; call set_optimizer", lambda: net(*batch()))
    refused(NotImplementedError, "Model has no train_one_batch", lambda: Model()())
    net.on_device(device.get_default_device())
    assert list(net.get_params()) == NAMES
    net, path = compiled(), tmp_path / "other"
    before = copies(net.get_states())
    for write in (compiled(hidden=8).save_states, lambda path: safetensors.numpy.save_file(before, path)):
        write(path)
        refused(StateError, str(path), net.load_states, path)
        np.testing.assert_equal(copies(net.get_states()), before)
    refused(FileNotFoundError, "", net.load_states, tmp_path / "absent")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_states_make_a_round_trip_to_the_bit(tmp_path, dtype):
    net, other = compiled(dtype), compiled(dtype, seed=1)
    memory = other.conv1.W.array
    net(*batch(dtype=dtype))
    aux = {"epoch": 3, "scale": 0.1, "order": np.arange(6).reshape(2, 3).T, "loss": Tensor.of(np.ones(1))}
    for _ in range(2):
        net.save_states(tmp_path / "net.state", aux)
        loaded = other.load_states(str(tmp_path / "net.state"))
    assert [p.name for p in tmp_path.iterdir()] == ["net.state"]
    assert list(net.get_states()) == [*NAMES, "norm.running_mean", "norm.running_var"]
    np.testing.assert_equal(copies(other.get_states()), copies(net.get_states()))
    assert other.conv1.W.array is memory
    assert all(isinstance(value, Tensor) for value in loaded.values())
    assert loaded["scale"].item() == 0.1, "with all its bits"
    np.testing.assert_equal(copies(loaded), {**aux, "loss": [1], "epoch": [3], "scale": [0.1]})
    net.save_states(tmp_path / "net.state")
    refused(UsageError, r"aux_states\['note'\] has dtype", net.save_states, tmp_path / "net.state", {"note": "text"})
    assert other.load_states(tmp_path / "net.state") == {}


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_states_of_an_optimizer_may_lie_in_the_file(tmp_path, wrapped):
    nets, optimizers = [compiled(seed=1), compiled(seed=2)], [optim.Adam(lr=0.01) for _ in range(2)]
    optimizers = [optim.DistOpt(adam) if wrapped else adam for adam in optimizers]
    for net, each in zip(nets, optimizers, strict=True):
        net.dropout.ratio = 0.0
        net.set_optimizer(each)
        net(*batch())
    nets[0].save_states(tmp_path / "all.zip", optimizers[0].get_states())
    optimizers[1].set_states(nets[1].load_states(tmp_path / "all.zip"))
    losses = [[net(*batch(step))[1].item() for step in range(4)] for net in nets]
    assert losses[0] == losses[1]
    assert optimizers[0].get_states().keys() == optimizers[1].get_states().keys()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_has_parameters_of_its_own_and_no_optimizer(copied):
    net = compiled()
    net(*batch())
    other, before = copied(net), copies(net.get_states())
    assert other.conv1.W.device is net.conv1.W.device
    refused(UsageError, "CNN has no optimizer", lambda: other(*batch()))
    other.set_optimizer(optim.SGD(lr=0.5))
    other(*batch())
    np.testing.assert_equal(copies(net.get_states()), before)
    assert not any(np.array_equal(value, before[name]) for name, value in copies(other.get_states()).items())
    net(*batch())


@pytest.mark.parametrize(
    "kept", [lambda: {layer.Linear(4)}, lambda: collections.deque([layer.Linear(4)]), lambda: map(layer.Linear, [4])]
)
def test_a_layer_that_files_would_lack_is_refused(kept):
    class Hidden(Model):
        def __init__(self):
            super().__init__()
            self.kept = kept()  # a set, a deque, or none before `forward`

        def forward(self, x):
            return next(iter(self.kept))(x)

    error = r"Hidden uses a Linear with parameters .* make it in Hidden\.__init__"
    refused(UsageError, error, Hidden().compile, [Tensor((2, 3))])
