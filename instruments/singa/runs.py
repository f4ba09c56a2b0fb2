"""The runs of instruments/singa/scripts: SINGA's example scripts with their options, and all changes to their files."""

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Edit:
    """A change in a script beyond its imports. Both texts are literal; {data} is the folder with the data sets."""

    files: str  # glob below examples/
    old: str
    new: str


# Folders of data, and numbers of epochs, steps and images that are constants in the scripts.
EDITS = (
    Edit("*/data/mnist.py", "'/tmp/", "'{data}/mnist/"),
    Edit("*/data/cifar100.py", "'/tmp/", "'{data}/"),
    Edit("cnn/data/cifar10.py", "'/tmp/", "'{data}/"),
    Edit("cifar_distributed_cnn/data/cifar10.py", "'/scratch/snx3000/lyongbin/singa_my/cifar10_log/", "'{data}/"),
    Edit("*/data/cifar10.py", "batchsize = 10000", "batchsize = len(load_dataset(dir_path + '/data_batch_1')[0])"),
    Edit("*/autograd/mnist_cnn.py", "'/tmp/", "'{data}/mnist/"),
    Edit("*/autograd/mnist_cnn.py", "max_epoch = 10", "max_epoch = 2"),
    Edit("*/autograd/resnet_cifar10.py", "'cifar-10-batches-py'", "'{data}/cifar-10-batches-py'"),
    Edit(
        "*/autograd/resnet_cifar10.py",
        "batchsize = 10000",
        "batchsize = len(load_dataset(dir_path + '/data_batch_1')[0])",
    ),
    Edit("*/autograd/resnet_cifar10.py", "max_epoch = 5", "max_epoch = 2"),
    Edit("*/autograd/resnet_cifar10.py", "batch_size = 32", "batch_size = 2"),
    Edit("*/autograd/resnet_dist.py", "niters = 100", "niters = 3"),
    Edit("*/autograd/resnet_dist.py", "batch_size = 32", "batch_size = 2"),
    Edit("*/autograd/xceptionnet.py", "niters = 20", "niters = 3"),
    Edit("*/autograd/xceptionnet.py", "batch_size = 16", "batch_size = 2"),
    Edit("*/benchmark.py", "niters = 100", "niters = 3"),
    Edit("*/benchmark.py", "batch_size = 32", "batch_size = 2"),
    Edit("cifar_distributed_cnn/train_cnn.py", "niters = 100", "niters = 3"),
    Edit("gan/*an*.py", "iterations = 1000000", "iterations = 20"),
    Edit("gan/*an*.py", "interval = 1000\n", "interval = 10\n"),
    Edit("gan/*an*.py", "'mnist.pkl.gz'\n    file_dir", "'{data}/mnist/mnist.pkl.gz'\n    file_dir"),
    Edit("rbm/train.py", "num_epoch=10", "num_epoch=2"),
    Edit("largedataset_cnn/process_data.py", "'/Dataset/", "'{data}/images/"),
)


@dataclass(frozen=True)
class Run:
    """One command, and what must come of it.

    Attributes:
        folder: below examples/; the script runs there.
        command: the script and its arguments.
        mpi_ranks: started by mpiexec in this number, or None.
        ranks: number of processes that train.
        losses: how many times "training loss" must be printed; 0: the script prints none.
        accuracies: how many times an accuracy must be printed.
        data: which data sets; see data.py.
        equal: whether the ranks must end with the same parameters.
        trains: whether the script calls the optimizer.
        resumes: whether the run resumes from the checkpoint of the one before.
        breaks: the end of the error with which the run ends, because of a fault of the script.
    """

    folder: str
    command: str
    mpi_ranks: int | None = None
    ranks: int = 1
    losses: int = 0
    accuracies: int = 0
    data: str = "normal"
    equal: bool = True
    trains: bool = True
    resumes: bool = False
    breaks: str = ""

    @property
    def label(self) -> str:
        """The command as one types it."""
        return (f"mpiexec -n {self.mpi_ranks} " if self.mpi_ranks else "") + f"python {self.command}"


OPTIONS = ("plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold")


def cnn() -> Iterator[Run]:
    """The full cross for SINGA's CNN on MNIST."""
    for precision in ("float32", "float16"):
        for graph in ("", " -g"):
            tail = graph + (" -p float16" if precision == "float16" else "")
            yield epochs("train_cnn.py cnn mnist" + tail)
            for mpi_ranks in (1, 2):
                for option in OPTIONS:
                    yield epochs(f"train_mpi.py cnn mnist -d {option}{tail}", mpi_ranks=mpi_ranks, ranks=mpi_ranks)
            for option in OPTIONS:
                yield epochs(f"train_multiprocess.py cnn mnist -w 2 -d {option}{tail}", ranks=2)


def models() -> Iterator[Run]:
    """Every other model and data set, and the options that are not in the cross."""
    yield epochs("train_cnn.py mlp mnist")
    yield epochs("train_cnn.py mlp cifar10 -b 128 -l 0.01 -g")
    yield epochs("train_cnn.py mlp cifar100 -i 0 -v 1")
    yield epochs("train_cnn.py cnn cifar10 -v 2 -g")
    yield epochs("train_cnn.py cnn cifar100")
    for option in OPTIONS:
        yield epochs(f"train_mpi.py mlp mnist -d {option} -s 0.01", mpi_ranks=2, ranks=2)
    yield epochs("train_multiprocess.py mlp cifar100 -w 3 -b 32", ranks=3)
    yield epochs("train_multiprocess.py cnn cifar10 -w 2 -d sparseTopK -s 0.01", ranks=2)
    for model in ("alexnet", "resnet", "xceptionnet"):
        yield large(f"train_cnn.py {model} mnist")
    yield large("train_cnn.py alexnet cifar10 -g")
    yield large("train_cnn.py resnet cifar100 -g -p float16")
    yield large("train_mpi.py resnet cifar10 -d half", mpi_ranks=2, ranks=2)
    yield large("train_mpi.py xceptionnet cifar10 -d sparseTopK", mpi_ranks=2, ranks=2)
    yield large("train_multiprocess.py resnet cifar10 -w 2 -d partialUpdate -g", ranks=2)
    yield large("train_multiprocess.py xceptionnet mnist -w 2 -d sparseThreshold", ranks=2)


def resnet() -> Iterator[Run]:
    """Three steps of each residual network."""
    for depth in (18, 34, 50, 101, 152):
        yield Run("cnn", f"{{added}}/resnet_steps.py resnet{depth}", losses=3)


def autograd() -> Iterator[Run]:
    """The scripts without `Model`; three folders have copies of them."""
    for folder in ("cnn", "cifar_distributed_cnn", "largedataset_cnn"):
        where = f"{folder}/autograd"
        two = {"losses": 2, "accuracies": 2}
        yield Run(where, "mnist_cnn.py", **two)
        yield Run(where, "mnist_dist.py", mpi_ranks=1, **two)
        yield Run(where, "mnist_dist.py", mpi_ranks=2, ranks=2, **two)
        yield Run(where, "mnist_multiprocess.py 2", ranks=2, **two)
        yield Run(where, "sparsification_mnist.py 2", ranks=2, **two)
        yield Run(where, "resnet_cifar10.py", data="small", **two)
        # A partial update; but the script averages all parameters before it evaluates.
        yield Run(where, "cifar10_multiprocess.py 2", ranks=2, data="small", **two)
        yield Run(where, "resnet_dist.py", mpi_ranks=1)
        yield Run(where, "resnet_dist.py", mpi_ranks=2, ranks=2)
        yield Run(where, "xceptionnet.py")


def mlp() -> Iterator[Run]:
    """The two scripts with generated points."""
    for precision in ("", " -p float16"):
        yield Run("mlp", "native.py" + precision, losses=11)
        for graph in ("", " -g"):
            # It passes 'fp32', an option that its own model lacks: the optimizer is never called.
            yield Run("mlp", "model.py" + graph + precision, losses=11, trains=False)


def others() -> Iterator[Run]:
    """GANs, which use a graph twice, a machine without `autograd`, copies of the MLP, and images of cells."""
    for name in ("vanilla.py", "lsgan.py"):
        yield Run("gan", f"{name} mnist.pkl.gz")
    # It computes its gradients itself, and hands them to `Optimizer.apply`, which is not watched.
    yield Run("rbm", "train.py {data}/mnist/mnist.pkl.gz", ranks=0, trains=False)
    for folder in ("msmlp", "ms_model_mlp", "msmodel_mlp"):
        yield Run(folder, "native.py", losses=11)
    for folder in ("msmlp", "ms_model_mlp"):
        yield Run(folder, "model.py", trains=False, breaks="name 'MLP' is not defined")
    yield Run("malaria_cnn", "train_cnn.py cnn malaria -dir {data}/health/malaria -m 1 -b 8", losses=1, accuracies=1)


def healthcare() -> Iterator[Run]:
    """One epoch or two of each application whose data need no account or download."""
    health, two = "{data}/health", {"losses": 2, "accuracies": 2}
    applications = {
        "Candidiasis": Run(
            "", f"candidiasisnet candidiasis -dir {health} -m 2", breaks="name 'accuracy' is not defined"
        ),
        "Cardiovascular": Run("", f"cardionet -dir {health} -m 2", breaks="No module named 'model'"),
        "Cerebrovascular": Run("", f"cerebrovascularnet cerebrovascular -dir {health} -m 2", **two),
        "Diabetic": Run("", f"drnet diaret -dir {health}/diaret -m 1 -b 8", losses=1, accuracies=1),
        "Hematologic": Run("", f"hematologicnet -dir {health}/blood -m 1", breaks="1.20.0-notes.html#deprecations"),
        "Kidney": Run("", f"kidneynet -dir {health} -m 2", **two),
        "Malaria": Run("", f"malarianet malaria -dir {health}/malaria -m 1 -b 8", losses=1, accuracies=1),
        "Thyroid_Eye": Run("", "tedctnet -dir {data}/cifar-10-batches-py -m 1", losses=1, accuracies=1),
    }
    for name, run in applications.items():
        folder = f"healthcare/application/{name}_Disease"
        if name == "Diabetic":
            folder += "/Diabetic_Retinopathy_Classification"
        yield replace(run, folder=folder, command=f"train.py {run.command}")


def benchmark() -> Iterator[Run]:
    """Throughput of ResNet-50. They pass 'fp32' too, which trains nothing."""
    for folder in ("cnn", "cifar_distributed_cnn"):
        yield Run(folder, "benchmark.py", trains=False)
        yield Run(folder, "benchmark.py --no-graph --verbosity 1", trains=False)
        yield Run(folder, "benchmark.py --dist", mpi_ranks=2, ranks=2, trains=False)


def largedataset() -> Iterator[Run]:
    """Images from a folder. The options 'fp32' and 'fp16' of these scripts are none of their models: nothing trains."""
    where = "largedataset_cnn"
    two, three = {"losses": 2, "accuracies": 2}, {"losses": 3, "accuracies": 3}
    yield Run(where, "train_largedata.py cnn --epoch 2", trains=False, **two)
    yield Run(where, "train_largedata.py cnn --epoch 3", trains=False, resumes=True, **three)
    for option in ("fp32", "fp16", "partialUpdate", "sparseTopK", "sparseThreshold"):
        yield Run(
            where, f"train_mpi.py cnn --epoch 2 --bs 32 --lr 0.01 --op {option}", mpi_ranks=2, ranks=2,
            losses=2, accuracies=2, equal=option != "partialUpdate", trains=not option.startswith("fp"),
        )  # fmt: skip
    small = {"losses": 1, "accuracies": 1, "data": "small"}
    yield Run(
        where, "train_largedata.py alexnet --epoch 1 --bs 2 --no-graph --verbosity 1 --id 0", trains=False, **small
    )
    yield Run(where, "train_largedata.py resnet --epoch 1 --bs 2", trains=False, **small)
    yield Run(
        where,
        "train_mpi.py resnet --epoch 1 --bs 2 --lr 0.0005 --op sparseTopK --spars 0.01",
        mpi_ranks=2,
        ranks=2,
        **small,
    )
    yield Run(
        where,
        "train_mpi.py xceptionnet --epoch 1 --bs 2 --lr 0.0001 --op sparseTopK --no-graph",
        mpi_ranks=2,
        ranks=2,
        **small,
    )


def cifar() -> Iterator[Run]:
    """The throughput variant of train_cnn.py."""
    where = "cifar_distributed_cnn"
    yield Run(where, "train_cnn.py cnn cifar10 -l 0.0005")
    # These two print model.input_size at their end, which SINGA's MLP lacks.
    breaks = "'MLP' object has no attribute 'input_size'"
    yield Run(where, "train_cnn.py mlp cifar100 -g", breaks=breaks)
    yield Run(where, "train_mpi.py mlp mnist -l 0.015 -b 32", mpi_ranks=2, ranks=2, breaks=breaks)
    yield Run(where, "train_cnn.py alexnet mnist -b 2", data="small")
    for option in OPTIONS:
        equal = option != "partialUpdate"
        yield Run(where, f"train_mpi.py cnn cifar10 -l 0.0005 -d {option}", mpi_ranks=2, ranks=2, equal=equal)
        yield Run(where, f"train_multiprocess.py cnn mnist -w 2 -d {option} -g", ranks=2, equal=equal)
    yield Run(where, "train_mpi.py resnet cifar10 -l 0.0005 -b 2", mpi_ranks=2, ranks=2, data="small")
    yield Run(where, "train_mpi.py xceptionnet cifar100 -l 0.0001 -b 2", mpi_ranks=2, ranks=2, data="small")


def epochs(command: str, **options) -> Run:
    """Two epochs of a script that has the option -m."""
    return Run("cnn", f"{command} -m 2", losses=2, accuracies=2, equal="partialUpdate" not in command, **options)


def large(command: str, **options) -> Run:
    """Two epochs over the few images that are enough for networks of 224 and more pixels."""
    return epochs(f"{command} -b 2 -l 0.0001", data="small", **options)


_ALL = (cnn, models, resnet, autograd, mlp, others, healthcare, benchmark, largedataset, cifar)
GROUPS = {group.__name__: group for group in _ALL}
