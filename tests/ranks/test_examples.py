"""The examples as a user runs them: output, exit codes, and one line with the cure for each wrong input."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from distopt import opt, tensor
from tests.digits import write_digits
from tests.events import scalars
from tests.processes import ROOT, RUN, Ended, Program, mpiexec, on_a_terminal

sys.path.insert(0, str(ROOT / "examples"))
from zoo import models

MULTIPROCESS = str(ROOT / "examples/mnist_multiprocess.py")
DIST = str(ROOT / "examples/mnist_dist.py")
TRAIN = 384


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    return write_digits(tmp_path_factory.mktemp("digits"), TRAIN, 100)


def python(*args: str, code: int = 0, env: dict[str, str] | None = None) -> Ended:
    return Program([sys.executable, *args], env).end(code=code)


def multiprocess(*args: str) -> Ended:
    return python(MULTIPROCESS, *args, "--", "2")


EPOCH = re.compile(
    r"Starting Epoch \d:\n"
    r"Training loss = (\d+\.\d{6}), training accuracy = (0\.\d{6})\n"
    r"Evaluation accuracy = (0\.\d{6}), Elapsed Time = \d+\.\d{3}s, \d+ images/s\n"
)


def test_both_launchers_print_the_same_numbers(digits):
    options = "--data-dir", str(digits), "-m", "1", "-b", "32"
    (figures,), (others,) = (EPOCH.findall(x.stdout) for x in (multiprocess(*options), mpiexec(2, DIST, *options)))
    assert figures == others


@pytest.mark.slow(kept=2, rest=3)
@pytest.mark.parametrize(
    ("script", "asked"),
    [
        *((script, "-h") for script in ("mnist_multiprocess", "mnist_dist", "mnist_slurm", "zoo/train")),
        *((script, "-h") for script in ("pytorch/mnist_ddp", "pytorch/tensor_parallel", "slurm/submit")),
        *((script, "-h") for script in ("pytorch/language/serve", "slurm/fetch_mnist")),
        ("mnist_dist", "--help"),
        *(("template/train", asked) for asked in ("-h", "-help", "--help")),  # an option of its own, not argparse's
    ],
)
def test_help(script, asked):
    if script.partition("/")[0] in ("pytorch", "template"):
        pytest.importorskip("torch")
    if script == "slurm/submit":
        pytest.importorskip("submitit")
    ended = python(str(ROOT / f"examples/{script}.py"), asked)
    assert ended.stderr == ""
    assert ended.stdout.startswith("usage: ")


def test_an_epoch_shows_its_progress_on_a_terminal(digits):
    code, shown = on_a_terminal([DIST, "--data-dir", str(digits), "-m", "1", "-b", "16"])
    assert code == 0, shown
    assert re.search(r"\d images/s, loss=\d", shown), shown
    assert shown.rpartition("\r")[2] == ""
    assert shown.split("\r")[-2].strip() == "", "the line is wiped out"


def test_an_epoch_shows_its_progress_in_a_log(digits):
    """A line every few seconds; here after each step."""
    code = "import runpy, sys; sys.path.insert(0, sys.argv[1]); import train_cnn; train_cnn.LOG_SECONDS = 0.0; "
    code += "sys.argv[:] = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    options = "--data-dir", str(digits), "-m", "1", "-b", "32", "--no-augment"
    ended = python("-c", code, str(ROOT / "examples"), DIST, *options)
    assert EPOCH.search(ended.stdout), "figures stand alone"
    shown = [int(done) for done in re.findall(r"^Epoch 0 \[(\d+)/\d+\], \d+ images/s, loss=\d", ended.stderr, re.M)]
    assert len(shown) > 1
    assert shown == sorted(set(shown))


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("script", ["mnist_dist.py", "mnist_slurm.py", "pytorch/mnist_ddp.py"])
def test_numbers_for_tensorboard(script, digits, tmp_path):
    pytest.importorskip("tensorboardX")
    if "pytorch" in script:
        pytest.importorskip("torch")
    epochs = "--max-epoch" if "dist" in script else "--epochs"
    options = [epochs, "1", "--batch-size", "8", "--tensorboard", str(tmp_path)]
    command = [*RUN, "--nproc-per-node", "2", str(ROOT / "examples" / script), *options]
    Program(command, {"DISTOPT_DATA_DIR": str(digits)}).end(code=0)
    shown = scalars(tmp_path)
    steps = TRAIN // 16
    for name in ("train/loss", "train/learning rate", "speed/images per s", "speed/ms of waiting per step"):
        assert list(shown[name]) == list(range(10, steps + 1, 10)), name
    assert list(shown["speed/bytes per step"].values()) == pytest.approx([4 * 431_080] * (steps // 10), rel=0.01)
    assert list(shown["test set/accuracy"]) == [steps]


@pytest.mark.slow(kept=1, rest=1)
@pytest.mark.parametrize("script", ["mnist_dist.py", "mnist_slurm.py", "pytorch/mnist_ddp.py"])
def test_tensorboard_without_its_package(script, tmp_path):
    if "pytorch" in script:
        pytest.importorskip("torch")
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find_spec = util.find_spec\n"
        "util.find_spec = lambda name, *package: None if name == 'tensorboardX' else find_spec(name, *package)\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = python(str(ROOT / "examples" / script), "--tensorboard", "x", code=2, env=env)
    assert "tensorboardX is not installed; pip install tensorboardX tensorboard" in ended.stderr.splitlines()[-1]


@pytest.mark.slow(rest=1)
@pytest.mark.parametrize("script", ["mnist_dist.py", "mnist_slurm.py"])
def test_an_accuracy_on_generated_digits_says_so(script, tmp_path):
    (tmp_path / "home").write_text("no folder, and so no cache")
    env = {"HOME": str(tmp_path / "home"), "DISTOPT_DATA_DIR": ""}
    epochs = "-e" if "slurm" in script else "-m"
    ended = python(str(ROOT / "examples" / script), epochs, "1", "-b", "6000", env=env)
    lines = [line for line in ended.stdout.splitlines() if "ccuracy" in line]
    assert lines
    assert all("(generated digits, not MNIST)" in line for line in lines)


@pytest.mark.slow
def test_fetching_mnist_says_whether_it_is_absent_broken_or_there(digits, tmp_path):
    (tmp_path / "home").write_text("no folder, and so no cache")
    there = f"384 images to train on and 100 to test: a custom data set in {digits}\n"
    for folder, code, stdout, stderr in (
        ("", 1, "", "set DISTOPT_DATA_DIR"),
        (tmp_path, 1, "", f"DataError: {tmp_path} has no file train-images"),
        (digits, 0, there, ""),
    ):
        env = {"HOME": str(tmp_path / "home"), "DISTOPT_DATA_DIR": str(folder)}
        ended = python(str(ROOT / "examples/slurm/fetch_mnist.py"), code=code, env=env)
        assert ended.stdout == stdout
        assert stderr in ended.stderr


@pytest.mark.slow(kept=2, rest=3)
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        *((["--", size], (size,)) for size in ("0", "-1", "two", "1.5")),
        (["-d", "fp8"], ("fp8", "fp16", "sparseTopK")),
        (["-b", "193"], ("193", "use batch_size 192 or less")),
        (["--data-dir", "/nowhere/at/all"], ("/nowhere/at/all",)),
        (["--reset"], ("--reset needs --checkpoint DIR",)),
        (["--checkpoint", "{folder}", "--checkpoint-every", "-1"], ("less than 1",)),
        (["--checkpoint", "{folder}/file/x"], ("file", "another folder")),
        (
            ["-b", "32", "--checkpoint", "{folder}"],
            ("none of the 1 checkpoints", "not written by distopt.checkpoint", "--reset"),
        ),
    ],
)
def test_wrong_options(words, parts, digits, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "step-0000000001").mkdir()
    (tmp_path / "step-0000000001" / "checkpoint.json").write_text("{}")
    words = [word.format(folder=tmp_path) for word in words]
    words += [] if "--" in words else ["--", "2"]
    ended = python(MULTIPROCESS, "--data-dir", str(digits), *words, code=2)
    said = [line for line in ended.stderr.splitlines() if "error:" in line or "failed:" in line]
    assert len(said) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    for part in parts:
        assert part in said[0]


def test_a_wrong_option_under_mpiexec_is_one_line(digits):
    ended = mpiexec(2, DIST, "--data-dir", str(digits), "-d", "fp8")
    assert ended.code == 2, ended
    assert ended.stderr.count("error:") == 1, ended.stderr
    assert "Traceback" not in ended.stderr


# -- checkpoints ------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_an_example_goes_on_in_the_middle_of_an_epoch(digits, tmp_path):
    folder = tmp_path / "checkpoints"
    options = ["--data-dir", str(digits), "-b", "32", "-d", "sparseTopK"]  # six steps per epoch
    whole = multiprocess(*options, "-m", "2")
    saving = [*options, "--checkpoint", str(folder), "--checkpoint-every", "4"]
    first = multiprocess(*saving, "-m", "1")
    assert EPOCH.findall(first.stdout) == EPOCH.findall(whole.stdout)[:1]
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-0000000004", "step-0000000006"]
    shutil.rmtree(folder / "step-0000000006")
    second = multiprocess(*saving, "-m", "2")
    assert second.stdout.startswith(f"Resuming from {folder / 'step-0000000004'} (step 4, epoch 0)\nStarting Epoch 0:")
    assert EPOCH.findall(second.stdout) == EPOCH.findall(whole.stdout)
    assert len(EPOCH.findall(whole.stdout)) == 2
    third = multiprocess(*saving, "-m", "2")
    assert "Resuming from" in third.stdout
    assert third.stdout.endswith("(step 12, epoch 2)\n")
    anew = multiprocess(*saving, "-m", "1", "--reset")
    assert anew.stdout.startswith("Starting Epoch 0:")
    assert EPOCH.findall(anew.stdout) == EPOCH.findall(whole.stdout)[:1]


# -- the networks of examples/zoo, and their training function as users call it --------------------------------------
ZOO = str(ROOT / "examples" / "zoo" / "train.py")
# Parameters for 10 classes and 3 channels of 32 x 32; torchvision's ResNets have as many for their own first layer.
PARAMETERS = {"resnet18": 11_173_962, "resnet34": 21_282_122, "resnet50": 23_520_842, "xceptionnet": 20_827_442}


@pytest.mark.slow(kept=2, rest=4)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", models.MODELS)
def test_a_step_of_every_network(name, half):
    rng = np.random.default_rng(0)
    x, y = tensor.from_numpy(rng.standard_normal((2, 3, 32, 32), np.float32)), tensor.from_numpy(np.array([1, 7]))
    net = models.build(name, image_size=32)
    net.half = half
    net.set_optimizer(opt.SGD(lr=0.001))
    net.compile([x], is_train=True)
    count = sum(param.size() for param in net.get_params().values())
    assert count == PARAMETERS.get(name, count)
    before = {key: param.to_numpy() for key, param in net.get_params().items()}
    net.train_one_batch(x, y)
    after = {key: param.to_numpy() for key, param in net.get_params().items()}
    assert all(np.isfinite(array).all() and array.dtype == np.float32 for array in after.values())
    assert any((after[key] != before[key]).any() for key in before)


def zoo(words: str, *more: str, code: int = 0) -> Ended:
    return python(ZOO, *words.split(), *more, code=code, env={"OMP_NUM_THREADS": "1"})


def losses(*words: str) -> list[float]:
    return [float(word) for word in re.findall(r"Training loss = (\S+),", zoo(*words).stdout)]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["sparseTopK", pytest.param("partialUpdate", marks=pytest.mark.sweep)])
def test_resnet18_trains(option):
    first, last = losses("--np 2 --model resnet18 --images 32 -b 8 -m 2 -l 0.005 --sync-batch-norm -d", option)
    assert last < first


@pytest.mark.slow(kept=1)
def test_cifar10_files_and_checkpoints(tmp_path):
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        rows = rng.integers(0, 256, (16, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        rows.tofile(tmp_path / name)
    words = f"--np 2 --model mlp --data cifar10 --precision float16 -b 8 --data-dir {tmp_path}"
    whole = losses(words, "-m", "2")
    parts = [losses(words, "--checkpoint", str(tmp_path / "runs"), "-m", count) for count in ("1", "2")]
    assert whole == parts[0] + parts[1]
    (tmp_path / "test_batch.bin").write_bytes(b"0" * 100)
    ended = zoo(words, code=2)
    assert "test_batch.bin has 100 bytes, which are no images of 3073 bytes" in ended.stderr
