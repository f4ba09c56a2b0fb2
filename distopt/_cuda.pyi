# The extension for GPUs: addresses of device memory, counts and streams are integers.

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
Sizes = tuple[int, ...]  # images and channels; or as in distopt.nn.kernels.gpu_images
Source = tuple[int, int, int, float, int, float]  # x, residual, momentum, scale, device_scale, decay

# -- numerics; csrc/cuda/layers.h says what they do
def lower(dtype: int, batch: Sizes, window: Sizes, x: int, columns: int, stream: int) -> None: ...
def gather_columns(dtype: int, batch: Sizes, window: Sizes, columns: int, dx: int, stream: int) -> None: ...
def spread(
    dtype: int, batch: Sizes, pixels: int, x: int, rows: bool, bias: int, relu: bool, y: int, stream: int
) -> None: ...
def collect(dtype: int, batch: Sizes, pixels: int, dy: int, y: int, dx: int, rows: bool, stream: int) -> None: ...
def channel_sums(
    dtype: int, batch: Sizes, pixels: int, x: int, rows: bool, add: bool, out: int, stream: int
) -> None: ...
def max_pool(
    dtype: int, batch: Sizes, window: Sizes, x: int, rows: bool, bias: int, relu: bool, y: int, taken: int, stream: int
) -> None: ...
def max_pool_backward(
    dtype: int, batch: Sizes, window: Sizes, dy: int, y: int, taken: int, dx: int, rows: bool, stream: int
) -> None: ...
def avg_pool(dtype: int, batch: Sizes, window: Sizes, x: int, y: int, stream: int) -> None: ...
def avg_pool_backward(dtype: int, batch: Sizes, window: Sizes, dy: int, dx: int, stream: int) -> None: ...
def add_bias(dtype: int, y: int, bias: int, rows: int, columns: int, relu: bool, stream: int) -> None: ...
def column_sums(dtype: int, matrix: int, rows: int, columns: int, out: int, stream: int) -> None: ...
def softmax(dtype: int, x: int, y: int, rows: int, columns: int, stream: int) -> None: ...
def cross_entropy(
    dtype: int,
    logits: int,
    labels: int,
    target: int,
    rows: int,
    columns: int,
    probability: int,
    row_loss: int,
    loss: int,
    error: int,
    stream: int,
) -> None: ...
def cross_entropy_backward(
    dtype: int,
    probability: int,
    labels: int,
    target: int,
    scale: int,
    factor: float,
    rows: int,
    columns: int,
    dlogits: int,
    stream: int,
) -> None: ...
def channel_moments(
    dtype: int,
    batch: Sizes,
    pixels: int,
    x: int,
    mean: int,
    inverse_deviation: int,
    running_mean: int,
    running_var: int,
    momentum: float,
    eps: float,
    training: bool,
    stream: int,
) -> None: ...
def normalize(
    dtype: int,
    batch: Sizes,
    pixels: int,
    x: int,
    mean: int,
    inverse_deviation: int,
    gamma: int,
    beta: int,
    y: int,
    stream: int,
) -> None: ...
def normalize_backward(
    dtype: int,
    batch: Sizes,
    pixels: int,
    dy: int,
    x: int,
    mean: int,
    inverse_deviation: int,
    gamma: int,
    training: bool,
    dgamma: int,
    dbeta: int,
    dx: int,
    stream: int,
) -> None: ...
def sgd(
    dtype: int,
    param: int,
    grad: int,
    momentum_buffer: int,
    count: int,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    stream: int,
) -> None: ...
def adam(
    dtype: int,
    param: int,
    grad: int,
    m: int,
    v: int,
    count: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    stream: int,
) -> None: ...
def rmsprop(
    dtype: int,
    param: int,
    grad: int,
    running: int,
    count: int,
    lr: float,
    rho: float,
    eps: float,
    weight_decay: float,
    stream: int,
) -> None: ...
def adagrad(
    dtype: int, param: int, grad: int, history: int, count: int, lr: float, eps: float, weight_decay: float, stream: int
) -> None: ...
def relu(dtype: int, x: int, y: int, count: int, stream: int) -> None: ...
def sigmoid(dtype: int, x: int, y: int, count: int, stream: int) -> None: ...
def relu_backward(dtype: int, dy: int, y: int, dx: int, count: int, stream: int) -> None: ...
def sigmoid_backward(dtype: int, dy: int, y: int, dx: int, count: int, stream: int) -> None: ...

# -- codecs; csrc/cuda/codec.h and select.h say what they do
squared_norm_parts: int

def encode16(
    x: int, residual: int, out: int, n: int, scale: float, limit: float, dtype: str, findings: int, stream: int
) -> None: ...
def decode16(x: int, out: int, n: int, scale: float, dtype: str, stream: int) -> None: ...
def squared_norm(x: int, n: int, workspace: int, norm: int, scale: int, limit: float, stream: int) -> None: ...
def find_nonfinite(dtype: int, x: int, n: int, from_bad: int, stream: int) -> None: ...
def mark_beyond(dtype: int, x: int, n: int, limit: float, from_bad: int, stream: int) -> None: ...
def accumulate(source: Source, n: int, findings: int, stream: int) -> None: ...
def candidate_capacity(n: int, k: int) -> int: ...
def select_workspace(n: int, capacity: int) -> int: ...
def top_k(
    source: Source, n: int, k: int, indices: int, values: int, workspace: int, findings: int, stream: int
) -> None: ...
def threshold(
    source: Source,
    n: int,
    bound: float,
    indices: int,
    values: int,
    capacity: int,
    workspace: int,
    findings: int,
    stream: int,
) -> None: ...
def clear_at(dense: int, indices: int, count: int, stream: int) -> None: ...
def scatter_sum(
    dense: int,
    n: int,
    indices: list[int],
    values: list[int],
    counts: list[int],
    lo: int,
    hi: int,
    scale: float,
    stream: int,
) -> None: ...

# -- nccl.cpp; types and reductions are the codes of distopt.comm.base, parts are (address, count)
def runtime_version() -> int: ...
def nccl_version(path: str) -> int: ...
def nccl_unique_id(path: str) -> bytes: ...
def device_count() -> int: ...
def pci_bus_id(device: int) -> str: ...

class NcclBoard:
    def __init__(self, fd: int, rank: int, names: Sequence[str]) -> None: ...

class NcclWork:
    def done(self) -> bool: ...
    def join(self, stream: int) -> None: ...
    def wait(self, timeout: float) -> None: ...

class NcclMemory:
    @property
    def address(self) -> int: ...

class NcclCommunicator:
    def __init__(
        self,
        path: str,
        unique_id: bytes,
        rank: int,
        world_size: int,
        board: NcclBoard,
        timeout: float,
        stall_warning: float,
        abort: float,
        warn: Callable[[str], object],
    ) -> None: ...
    def all_reduce(self, array: int, count: int, dtype: int, op: int, label: str, stream: int) -> NcclWork: ...
    def reduce_scatter(
        self, array: int, out: int, count: int, dtype: int, op: int, label: str, stream: int
    ) -> NcclWork: ...
    def all_gather(self, array: int, out: int, count: int, dtype: int, label: str, stream: int) -> NcclWork: ...
    def broadcast(self, array: int, count: int, root: int, dtype: int, label: str, stream: int) -> NcclWork: ...
    def barrier(self, scratch: int, stream: int) -> NcclWork: ...
    def gather_parts(
        self, own: int, count: int, parts: Sequence[tuple[int, int]], dtype: int, label: str, stream: int
    ) -> NcclWork: ...
    def exchange_parts(
        self,
        sent: Sequence[tuple[int, int]],
        received: Sequence[tuple[int, int]],
        dtype: int,
        label: str,
        stream: int,
    ) -> NcclWork: ...
    def allocate(self, n_bytes: int) -> NcclMemory | None: ...
    def abort(self, reason: str) -> None: ...
    def close(self) -> None: ...

# -- steps; csrc/cuda/cublas_api.h and csrc/cuda/step_graph.h say what they do
class Products:
    def multiply(
        self,
        dtype: int,
        rows: int,
        columns: int,
        inner: int,
        a_transposed: bool,
        b_transposed: bool,
        accumulate: bool,
        a: int,
        b: int,
        c: int,
        workspace: int,
        workspace_bytes: int,
        stream: int,
    ) -> None: ...

def products(library: str, tf32: bool) -> Products: ...

class GraphPiece:
    @property
    def nodes(self) -> int: ...
    def launch(self, stream: int) -> None: ...

def begin_capture(stream: int) -> None: ...
def end_capture(stream: int) -> GraphPiece: ...
def abort_capture(stream: int) -> None: ...
def allow_in_capture(call: Callable[[], T]) -> T: ...
