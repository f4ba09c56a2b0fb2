# The extension for GPUs: addresses of device memory, counts and streams are integers.

# -- codecs; csrc/cuda_codec_kernels.h and csrc/cuda_select_kernels.h say what they do
squared_norm_parts: int

def encode16(
    x: int, residual: int, out: int, n: int, dtype: str, scale: float, limit: float, findings: int, stream: int
) -> None: ...
def decode16(x: int, out: int, n: int, dtype: str, scale: float, stream: int) -> None: ...
def squared_norm(x: int, n: int, workspace: int, norm: int, scale: int, limit: float, stream: int) -> None: ...
def find_nonfinite(x: int, n: int, item_bytes: int, from_bad: int, stream: int) -> None: ...
def accumulate(
    x: int,
    n: int,
    residual: int,
    momentum: int,
    scale: float,
    device_scale: int,
    decay: float,
    findings: int,
    stream: int,
) -> None: ...
def candidate_capacity(n: int, k: int) -> int: ...
def select_workspace(n: int, capacity: int) -> int: ...
def top_k(
    x: int,
    n: int,
    k: int,
    indices: int,
    values: int,
    workspace: int,
    residual: int,
    momentum: int,
    scale: float,
    device_scale: int,
    decay: float,
    findings: int,
    stream: int,
) -> None: ...
def threshold(
    x: int,
    n: int,
    bound: float,
    indices: int,
    values: int,
    capacity: int,
    workspace: int,
    residual: int,
    momentum: int,
    scale: float,
    device_scale: int,
    decay: float,
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
