"""Types of the C core (core.h says what each function does); addresses are plain integers."""

ES_OK: int
ES_AGAIN: int
ES_ABORTED: int
ES_MISMATCH: int
ES_TAG_BYTES: int
ES_ERROR_BYTES: int

def control_bytes(num_workers: int, slot_bytes: int, /) -> int: ...
def init(base: int, num_workers: int, slot_bytes: int, /) -> None: ...
def describe(base: int, /) -> tuple[int, int] | None: ...
def post(base: int, worker: int, seq: int, tag: str, data: int, num_bytes: int, /) -> None: ...
def collect(
    base: int, worker: int, seq: int, tag: str, out: int, num_bytes: int, spin: int, timeout_ns: int, /
) -> int: ...
def last_post(base: int, worker: int, /) -> tuple[int, int, str]: ...
def abort_all(base: int, author: int, culprit: int, text: str | bytes, /) -> bool: ...
def aborted(base: int, /) -> tuple[int, str] | None: ...
def clear_abort(base: int, /) -> None: ...
def set_pid(base: int, worker: int, pid: int, /) -> None: ...
def pid(base: int, worker: int, /) -> int: ...
def load(word: int, /) -> int: ...
def store(word: int, value: int, /) -> None: ...
def tree_sum(dtype: int, inputs: tuple[int, ...], merges: bytes, out: int, count: int, /) -> None: ...
def die_with_parent() -> None: ...
def keep_memory() -> None: ...
def norm_statistics(
    dtype: int, outer: int, channels: int, inner: int, num_threads: int, x: int, out: int, /
) -> None: ...
def norm_apply(
    dtype: int,
    outer: int,
    channels: int,
    inner: int,
    num_threads: int,
    x: int,
    mean: int,
    invstd: int,
    weight_dtype: int,
    weight: int,
    bias_dtype: int,
    bias: int,
    out: int,
    /,
) -> None: ...
def norm_reduce(
    dtype: int, outer: int, channels: int, inner: int, num_threads: int, dy: int, x: int, mean: int, out: int, /
) -> None: ...
def norm_backward(
    dtype: int,
    outer: int,
    channels: int,
    inner: int,
    num_threads: int,
    dy: int,
    x: int,
    mean: int,
    invstd: int,
    weight_dtype: int,
    weight: int,
    sum_dy: int,
    sum_dy_xmu: int,
    count: float,
    out: int,
    /,
) -> None: ...
def norm_move(
    channels: int,
    mean: int,
    m2: int,
    count: float,
    factor: float,
    running_mean_dtype: int,
    running_mean: int,
    running_var_dtype: int,
    running_var: int,
    /,
) -> None: ...
def norm_merge(num_rows: int, channels: int, rows: int, /) -> None: ...
