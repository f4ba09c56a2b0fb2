"""Arguments that make no sense: each call gives an error of one line. States, too, of which no part is taken over."""

import numpy as np
import pytest

from distopt import autograd, initializer, layer, opt, tensor
from distopt.checkpoint import adapters
from distopt.codecs import Threshold, TopK
from distopt.data.sampler import ShardedSampler, data_partition
from distopt.errors import StateError, UsageError
from distopt.nn.core.tensor import Tensor
from distopt.settings import Settings
from tests.ranks.small_net import Net
from tests.unit.nets import copies
from tests.unit.refusals import refused

LAYERS = [
    (lambda: layer.Conv2d(8, 0), "kernel_size is 0; it must be an integer of at least 1"),
    (lambda: layer.Conv2d(8, 3, stride=0), "stride is"),
    (lambda: layer.Conv2d(8, 3, padding=-1), "padding is -1; it must be an integer of at least 0"),
    (lambda: layer.Conv2d(8, 3, padding=(1, 1, 1)), r"padding is .*; got \(1, 1, 1\)"),
    (lambda: layer.Conv2d(8, 3, padding=None), "padding is None; it must be"),
    (lambda: layer.MaxPool2d(2, pad_mode="SAME"), "unknown pad_mode 'SAME'; choose one of NOTSET, SAME_UPPER, SA"),
    (lambda: layer.Conv2d(8, 3, dilation=2), "Conv2d has no dilation, as in SINGA"),
    (lambda: layer.Conv2d(8, 3, group=3), "8 kernels cannot be divided into 3 groups"),
    (lambda: layer.Conv2d(8, 3, group=0), "group is 0; it must be an integer of at least 1"),
    (lambda: layer.Conv2d(8, 3, pool=layer.MaxPool2d(2, pad_mode="SAME_UPPER")), "Conv2d pools with even padding"),
    (lambda: layer.Conv2d(8, 3, pool=layer.MaxPool2d(2, 2, (0, 1, 0, 1))), "Conv2d pools with even padding"),
    (lambda: layer.MaxPool1d((2, 2)), "kernel_size is"),
    (lambda: layer.Conv2d(3, 8, 3, 1, 1, 1), "Conv2d takes"),
    (lambda: layer.Conv2d(3, (8, 8), 3), "Conv2d takes"),
    (lambda: layer.Conv2d(8, 3, activation="TANH"), "unknown activation 'TANH'"),
    (lambda: layer.Conv2d(8, 3, pool=layer.AvgPool2d(2)), "Conv2d pools by a MaxPool2d layer"),
    (lambda: layer.Linear(1, 2, 3), "Linear takes"),
    (lambda: layer.Dropout(1.0), r"ratio of Dropout is 1.0; it must be a number in \[0, 1\)"),
    (lambda: layer.BatchNorm2d(momentum=2), r"a number in \[0, 1\]"),
    (lambda: layer.Conv2d(0, 3), "nb_kernels is 0; it must be an integer of at least 1"),
    (lambda: layer.Linear(8, -1), "out_features is -1; it must be an integer of at least 1"),
    (lambda: initializer.gaussian(Tensor((3, 4)), 0.0, 0.01), r"fan_in is 0.0; .*; t.gaussian\(mean, std\)"),
    (lambda: initializer.gaussian(Tensor((3, 4))), "takes fan_in and fan_out"),
    (lambda: initializer.gaussian(Tensor((3, 4)), -3), "fan_in is -3; it must be an integer of at least 0"),
    (lambda: initializer.eye(Tensor((3,))), r"eye fills matrices \[n, m\]; got a tensor of shape \[3\]"),
    (lambda: initializer.orthogonal(Tensor((3, 4, 5))), "orthogonal fills matrices"),
]

MATRIX, VECTOR, NAN = Tensor((3, 4)), Tensor((4,)), float("nan")
WEIGHT, OTHER_SHAPE, OTHER_TYPE = Tensor((2,), name="w"), Tensor((3,)), Tensor((2,), dtype=np.float64)
TENSORS = [
    (lambda: Tensor(shape=3), r"no tensor has shape 3 \(.*\); pass a tuple of sizes"),
    (lambda: Tensor(shape=(2, -1)), r"no tensor has shape \(2, -1\)"),
    (lambda: Tensor(shape=(2,), dtype="flaot32"), "'flaot32' is not an element type"),
    (lambda: Tensor(data="text"), "a tensor holds numbers, not <U4"),
    (lambda: Tensor(data=[1j]), "a tensor holds numbers, not complex128"),
    (lambda: Tensor(data=np.ones(2, np.longdouble)), "of up to 64 bits, not float128; convert the array by astype"),
    (lambda: Tensor(shape=(2,), dtype=complex), "<class 'complex'> is not an element type"),
    (lambda: Tensor(data=[1], dtype=str), "<class 'str'> is not an element type"),
    (lambda: Tensor(data=[[1, 2], [3]]), "no tensor has such data, a list"),
    (lambda: Tensor(data=["x"], dtype=np.float32), "no tensor has such data, a list"),
    (lambda: Tensor(data=None, shape=None), "no tensor has shape None"),
    (lambda: tensor.mult(VECTOR, MATRIX), r"matmul does not take tensors of shape \(4,\), \(3, 4\)"),
    (lambda: tensor.concatenate([MATRIX, VECTOR], 0), r"concatenate does not take tensors of shape \(3, 4\), \(4,\)"),
    (lambda: tensor.concatenate([], 0), "at least one tensor"),
    (lambda: tensor.einsum("ij,jk->ik", MATRIX, VECTOR), "einsum does not take"),
    (lambda: tensor.sum(MATRIX, axis=2), r"sum does not take .*axis 2 is out of bounds"),
    (lambda: tensor.transpose(MATRIX, (0, 0)), "transpose does not take"),
    (lambda: tensor.repeat(MATRIX, -1), "a number of repeats is -1; it must be an integer of at least 0"),
    (lambda: tensor.sum_rows(VECTOR), r"a matrix \[rows, columns\] is needed"),
    (lambda: tensor.pow(MATRIX, None), "tensors, arrays and numbers, not with None"),
    (lambda: MATRIX < "1", "tensors, arrays and numbers, not with '1'"),
]

SAMPLERS = [
    (lambda: ShardedSampler(100, 2, 0, 64), "batch of 64 is larger .* over 2 ranks give 50 each; use batch_size 50"),
    (lambda: ShardedSampler(3, 4, 0, 1), "3 samples over 4 ranks give 0 each; use fewer ranks"),
    (lambda: ShardedSampler(0, 2, 0, 1), "size is 0; it must be an integer of at least 1"),
    (lambda: ShardedSampler(-5, 2, 0, 1), "size is -5"),
    (lambda: ShardedSampler(100, 0, 0, 1), "world_size is 0"),
    (lambda: ShardedSampler(100, 2, 2, 1), "rank 2 is outside 0 ... 1"),
    (lambda: ShardedSampler(100, 2, -1, 1), "rank is -1"),
    (lambda: ShardedSampler(100, 2, 0, 0), "batch_size is 0; it must be an integer of at least 1"),
    (lambda: ShardedSampler(100, 2, 0, -3), "batch_size is -3"),
    (lambda: ShardedSampler(100, 2, 0, 8, -1), "seed is -1; it must be an integer of at least 0"),
    (lambda: ShardedSampler(4, 2, 0, 1, tail="pad"), "unknown tail 'pad'; choose one of drop, wrap"),
    (lambda: ShardedSampler(4, 2, 0, 1).set_epoch(-1), "epoch is -1"),
    (lambda: ShardedSampler(101, 3, 0, 3, shards=2), "2 shards leave nothing to some of 3 ranks"),
    (lambda: ShardedSampler(101, 3, 0, 13, shards=8), "101 samples over 8 shards give 12 each; .*fewer shards"),
    (lambda: data_partition(np.zeros((4, 2)), np.zeros(3), 0, 2), "4 samples have 3 labels"),
    (lambda: data_partition(np.zeros((3, 2)), np.zeros(3), 0, 4), "3 samples cannot be shared by 4 ranks"),
    (lambda: data_partition(np.zeros((4, 2)), np.zeros(4), 2, 2), "rank 2 is outside 0 ... 1"),
    (lambda: data_partition(np.zeros((4, 2)), np.zeros(4), 0, 0), "world_size is 0"),
]

FALLING = opt.ExponentialDecay(0.8, 2, 0.5)
OPTIMIZERS = [
    *[(lambda value=value: opt.SGD(lr=value), "^lr is ") for value in (-0.1, NAN, "0.1", None)],
    (lambda: opt.SGD(momentum=-1), "momentum is -1"),
    (lambda: opt.SGD(dampening=-1), "dampening is -1"),
    (lambda: opt.SGD(weight_decay=float("inf")), "weight_decay is inf"),
    (lambda: opt.SGD(nesterov=True), "nesterov needs a momentum above 0"),
    (lambda: opt.SGD(nesterov=True, momentum=0.9, dampening=0.1), "nesterov needs .* and a dampening of 0"),
    (lambda: opt.SGD(momentum=FALLING, dampening=FALLING, nesterov=True), "nesterov needs .* and a dampening of 0"),
    (lambda: opt.Adam(beta_1=1), r"beta_1 is 1; it must be a number in \[0, 1\)"),
    (lambda: opt.Adam(beta_2=-0.1), "beta_2 is -0.1"),
    (lambda: opt.Adam(epsilon=-1), "epsilon is -1"),
    *[(lambda value=value: opt.Adam(clip_grad_norm=value), "clip_grad_norm is ") for value in (0, -1, NAN, "1", [1.0])],
    (lambda: opt.RMSProp(rho=1.0), "rho is 1.0"),
    (lambda: opt.AdaGrad(weight_decay=-1), "weight_decay is -1"),
    (lambda: opt.ExponentialDecay(0.1, 0, 0.5), r"decay_steps is 0; it must be a number in \(0, inf\)"),
    (lambda: opt.ExponentialDecay(0.1, 1, -0.5), "decay_rate is -0.5"),
    (lambda: opt.StepDecay(0.1, 30), r"milestones are steps, as \[30, 60\], not 30; for intervals: Exponential"),
    (lambda: opt.StepDecay(0.1, [3, 0]), "a milestone is 0"),
    (lambda: opt.StepDecay(0.1, ["3"]), "a milestone is '3'"),
    (lambda: opt.StepDecay(0.1, [3], NAN), "decay_rate is nan"),
    (lambda: opt.CosineDecay(0.1, 0), "decay_steps is 0"),
    (lambda: opt.CosineDecay(0.1, 5, -0.1), "end_value is -0.1"),
    (lambda: opt.LinearWarmUp(0.1, 0), "warm_up_steps is 0"),
    (lambda: opt.LinearWarmUp(-0.1, 3), "init_value is -0.1"),
    (lambda: opt.LinearWarmUp(0.1, 3, -1), "start_factor is -1"),
    (lambda: opt.Constant(-0.1), "init_value is -0.1"),
    (
        lambda: opt.SGD().update(WEIGHT, OTHER_SHAPE),
        r"gradient of float32 and shape \(3,\) is none of w of float32 and",
    ),
    (lambda: opt.SGD().update(WEIGHT, OTHER_TYPE), r"gradient of float64 and shape \(2,\) is none of w of float32 and"),
    (lambda: opt.Adam().apply("w", WEIGHT, OTHER_SHAPE), r"shape \(3,\) is none of w of float32 and shape \(2,\)"),
    (lambda: opt.Adam().apply("w", WEIGHT, OTHER_TYPE), r"of float64 and shape \(2,\) is none of w of float32"),
]

OTHERS = [
    (lambda: opt.DistOpt(0.1), "DistOpt wraps an optimizer, such as .* got 0.1"),
    (lambda: opt.DistOpt(opt.SGD(), communicator=3), "DistOpt takes a communicator of distopt, .* got 3"),
    (lambda: opt.DistOpt(opt.SGD(), 3), "3 was given where a Ticket is expected; ranks of an mpi4py communicator"),
    (lambda: opt.DistOpt(opt.SGD), "DistOpt wraps an optimizer, such as .* got <class"),
    (lambda: opt.DistOpt(opt.DistOpt(opt.SGD())), "DistOpt wraps an optimizer, such as .* got <distopt"),
    (lambda: opt.DistOpt(opt.SGD(), codec=0.1), "0.1 is not a codec; pass one, .*top-k"),
    (lambda: opt.DistOpt(opt.SGD(), codec=TopK), "TopK'> is not a codec"),
    (lambda: Net(6, 3).set_optimizer(0.1), "trains with an optimizer, such as .* got 0.1"),
    (lambda: Net(6, 3).set_optimizer(opt.SGD), "trains with an optimizer, such as .* got <class"),
    (lambda: opt.SGD()(None), "a training step starts from its loss, a tensor; got None"),
    (lambda: opt.DistOpt(opt.SGD())(0.5), "a training step starts from its loss, a tensor; got 0.5"),
    (lambda: autograd.sigmoid(Tensor((6,), dtype=np.int32)), "Sigmoid takes floats, got int32; convert them by"),
    (lambda: Tensor((6, 5)).reshape((7, 2)), r"a tensor of shape \(6, 5\) cannot take the shape \(7, 2\)"),
    (lambda: tensor.from_numpy(np.ones(2), "cpu"), "'cpu' is no device"),
    (lambda: tensor.from_numpy(None), "a tensor holds numbers, not object"),
    (lambda: TopK("0.1"), "ratio of top-K is '0.1'; it must be a number in"),
    (lambda: Threshold("0.1"), "threshold is '0.1'; it must be a number in"),
    (lambda: Settings.from_env({"DISTOPT_TIMEOT": "9"}), "no variable .* DISTOPT_TIMEOT; .* DISTOPT_TIMEOUT?"),
    (lambda: Settings.from_env({"DISTOPT_Sum_Order": "rank"}), "did you mean DISTOPT_SUM_ORDER?"),
]

BAD = [NAN, float("inf"), -3, 1.5, 2**80, "text", b"text", None, [1, 2], {"a": 1}, 1j]
BAD += [np.array(value) for value in (NAN, -3, 1.5, "text", ["a", "b"])]
BAD += [np.array(2**63, np.uint64), np.array([None, 1], object), np.full(5, np.nan)]

MAKERS = {
    "SGD": lambda: after_steps(sgd()),
    "DistOpt": lambda: after_steps(opt.DistOpt(sgd())),
    "model": lambda: trained(sgd()),
    "sampler": lambda: ShardedSampler(20, 2, 0, 3),
}


@pytest.mark.parametrize(("call", "message"), [*LAYERS, *TENSORS, *SAMPLERS, *OPTIMIZERS, *OTHERS])
def test_arguments_that_make_no_sense_are_refused(call, message):
    refused(UsageError, message, call)


def trained(optimizer):
    net = Net(6, 3)
    net.set_optimizer(optimizer)
    x = tensor.from_numpy(np.arange(8, dtype=np.float32).reshape(2, 4))
    net.compile([x], is_train=True, use_graph=False, sequential=False)
    net.train()
    for _ in range(2):
        net(x, tensor.from_numpy(np.array([0, 2], np.int32)))
    return net


def sgd():
    return opt.SGD(lr=opt.ExponentialDecay(0.1, 2, 0.5), momentum=0.9)


def after_steps(optimizer):
    trained(optimizer)
    return optimizer


@pytest.mark.parametrize("name", MAKERS)
def test_each_state_in_turn_is_something_else(name):
    thing = MAKERS[name]()
    before = copies(thing.get_states())
    good = {key: x if name == "sampler" else before[key] for key, x in thing.get_states().items()}
    for key in good:
        for bad in BAD:
            states = {k: bad if k == key else x for k, x in reversed(list(good.items()))}
            for refuse in (thing.set_states, *([thing.check_states] if hasattr(thing, "check_states") else [])):
                refused(StateError, "", refuse, states)
            np.testing.assert_equal(copies(thing.get_states()), before, err_msg=f"{key} = {bad!r}")
    thing.set_states(good)
    if name == "sampler":
        for consumed in (40, 10**9):
            refused(StateError, f"consumed {consumed} of 20 samples", thing.set_states, {**good, "consumed": consumed})


def test_an_optimizer_that_knows_no_parameter_yet_and_scalars_are_refused():
    good = after_steps(sgd()).get_states()
    slot = next(key for key in good if ":" in key)
    for bad in BAD:
        if getattr(bad, "dtype", np.dtype(int)).kind == "f":
            continue  # an array of floats of the wrong shape is found when its parameter comes
        fresh = sgd()
        refused(StateError, slot, fresh.set_states, {**good, slot: bad})
        assert fresh.get_states() == {"step_counter": 0}
    refused(UsageError, "x is a float64, which cannot be saved", adapters.adapters_of, {"x": np.float64(3)})


@pytest.mark.parametrize("bad", ["text", None, [], {}, {"state": -1, "inc": 3}, {"state": np.nan, "inc": 3}], ids=str)
def test_a_random_generator_checks_its_whole_state(bad):
    generator = np.random.default_rng(7)
    before = generator.bit_generator.state
    (adapter,) = adapters.adapters_of({"noise": generator}).values()
    refused(StateError, "random generator", lambda: adapter.check(adapters.State({}, {"": {**before, "state": bad}})))
    assert generator.bit_generator.state == before
    adapter.check(adapters.State({}, {"": before}))
