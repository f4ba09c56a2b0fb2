# The extension for GPUs: addresses of device memory, counts and streams are integers.

# -- numerics; csrc/cuda_compute_kernels.h says what they do
def lower(
    dtype: int, images: int, channels: int, window: tuple[int, ...], x: int, columns: int, stream: int
) -> None: ...
def gather_columns(
    dtype: int, images: int, channels: int, window: tuple[int, ...], columns: int, dx: int, stream: int
) -> None: ...
def spread(
    dtype: int, images: int, channels: int, pixels: int, rows: int, bias: int, relu: bool, y: int, stream: int
) -> None: ...
def collect(dtype: int, images: int, channels: int, pixels: int, dy: int, y: int, rows: int, stream: int) -> None: ...
def row_sums(dtype: int, matrix: int, rows: int, columns: int, add: bool, out: int, stream: int) -> None: ...
def max_pool(
    dtype: int,
    images: int,
    channels: int,
    window: tuple[int, ...],
    x: int,
    rows: bool,
    bias: int,
    relu: bool,
    y: int,
    taken: int,
    stream: int,
) -> None: ...
def max_pool_backward(
    dtype: int,
    images: int,
    channels: int,
    window: tuple[int, ...],
    dy: int,
    y: int,
    taken: int,
    dx: int,
    rows: bool,
    stream: int,
) -> None: ...
def avg_pool(dtype: int, images: int, channels: int, window: tuple[int, ...], x: int, y: int, stream: int) -> None: ...
def avg_pool_backward(
    dtype: int, images: int, channels: int, window: tuple[int, ...], dy: int, dx: int, stream: int
) -> None: ...
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
    images: int,
    channels: int,
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
    images: int,
    channels: int,
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
    images: int,
    channels: int,
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
    first: bool,
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
