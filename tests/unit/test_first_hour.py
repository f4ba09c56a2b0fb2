"""First steps of a new user: values for NumPy, arguments that are none, a printed model, absent modules."""

import numpy as np
import pytest

import distopt
from distopt import autograd, layer, opt, tensor
from distopt.errors import UsageError
from distopt.launch.job.origin import origin
from distopt.settings import Settings
from tests.unit.nets import Chain
from tests.unit.refusals import refused


class Net(Chain):
    def __init__(self):
        super().__init__(body=layer.Linear(4, activation="RELU"), head=layer.Linear(3))


def batch(size=6):
    rng = np.random.default_rng(size)
    return tensor.from_numpy(rng.random((size, 5), np.float32)), tensor.from_numpy(np.arange(size) % 3)


def test_numpy_sees_the_values_of_a_tensor_and_one_element_is_a_number():
    values = np.array([[1, 3, 2], [6, 5, 4]], np.float32)
    t = tensor.from_numpy(values)
    for got in (np.asarray(t), t.numpy(), np.array(t, np.float32)):
        np.testing.assert_array_equal(got, values)
        got[0] = 0  # a copy
    assert (t.array[0, 1], np.argmax(t), np.asarray(t, np.int32).dtype) == (3, 3, np.int32)
    refused(UsageError, r"a copy; Tensor.array is", t.__array__, copy=False)
    t = tensor.from_numpy(np.array([0.12345], np.float32))
    assert float(t) == np.float32(0.12345)
    assert (f"{t:.3f}", "%.2f" % t, f"{t}") == ("0.123", "0.12", repr(t))  # noqa: UP031 - as SINGA's scripts print
    for use in (float, lambda t: f"{t:.3f}", tensor.Tensor.item):
        refused(UsageError, r"a tensor of shape \(2,\) is not a number", use, tensor.ones((2,)))


def test_variables_of_the_users_own_are_none_of_ours():
    assert Settings.from_env({"DISTOPT_EXPERIMENT": "7", "DISTOPT_DATA_DIR": "/data"}) == Settings()


def test_an_empty_batch_is_refused_in_training():
    net = Net()
    net.set_optimizer(opt.SGD(lr=0.1))
    net.compile([batch()[0]])
    refused(UsageError, r"Net got an empty batch; leave it out, under DistOpt within join", lambda: net(*batch(0)))
    net.eval()
    assert net(batch(0)[0]).shape == (0, 3)


@pytest.mark.parametrize(("rank", "warns"), [(0, False), (1, True), (2, False)])
def test_ranks_that_train_apart_are_told_once(rank, warns, monkeypatch, caplog, untold):
    monkeypatch.setattr(origin, "invitation", (None, rank, 3))
    for _ in range(2):
        net = Net()
        net.set_optimizer(opt.SGD(lr=0.1))
        net.compile([batch()[0]])
    assert [record.message.partition(";")[0] for record in caplog.records] == (
        ["3 ranks train a Net without DistOpt, each for itself"] if warns else []
    )


def test_a_world_uses_the_communicator_of_the_optimizer_that_was_there_first(monkeypatch):
    for name in ("_offers", "_worlds"):  # those of other tests, which the garbage collector may not have found yet
        monkeypatch.setattr(f"distopt.comm.world.{name}", {})
    first, second = opt.DistOpt(opt.SGD()), opt.DistOpt(opt.SGD())
    with distopt.init() as world:
        assert world.communicator is first.communicator is not second.communicator
    assert not first.communicator.closed
    first.communicator.close()
    with distopt.init() as world:
        assert world.communicator is not first.communicator


def test_a_model_in_print_and_absent_modules_of_singa():
    net = Net()
    assert str(net).splitlines() == [
        "Net, 0 parameters, before compile",
        "  body Linear",
        "  head Linear",
        "  loss SoftMaxCrossEntropy",
    ]
    net.compile([batch()[0]])
    assert str(net).splitlines()[:3] == [
        "Net, 39 parameters",
        "  body Linear: W [5, 4], b [4], 24 parameters",
        "  head Linear: W [4, 3], b [3], 15 parameters",
    ]
    assert str(net.head) == "Linear, 15 parameters"
    for name in ("sonnx", "image_tool", "snapshot", "utils"):
        error = rf"^distopt has no module {name} of SINGA's; .*'Coming from Apache SINGA'"
        refused(ImportError, error, exec, f"from distopt import {name}")


def test_a_second_pass_goes_by_the_values_that_the_parameters_have_then():
    w = tensor.Tensor(data=np.array([[2.0]], np.float32), stores_grad=True, name="w")
    v = tensor.Tensor(data=np.array([[3.0]], np.float32), stores_grad=True, name="v")
    autograd.training = True
    loss = autograd.reduce_sum(tensor.ones((1, 1)) @ w @ v)
    autograd.training = False
    sgd = opt.SGD(lr=1.0)
    for p, g in autograd.backward(loss):
        sgd.apply(p.name, p, g)
    assert (w.item(), v.item()) == (2 - 3, 3 - 2)
    assert {p.name: g.item() for p, g in autograd.backward(loss)} == {"v": 2.0, "w": 1.0}


def test_methods_of_layers_and_operators_of_scripts():
    own = layer.Layer()
    assert own._initialized is False
    half, single = tensor.ones((2,)).as_type("float16"), tensor.ones((2,))
    param = tensor.Tensor((2,), stores_grad=True)
    own.device_check(half, single)
    own.dtype_check(half, single, param)
    assert (single.dtype, param.dtype) == (np.float16, np.float32)
    operator = autograd.Operator("Mine")
    assert (operator.get_params(), operator.output_name(1), operator.grad_name(1)) == ([], "Mine:1", "Mine:1_g")
