"""Types of the C core (core.h says what each function does); addresses are plain integers."""

from collections.abc import Callable
from typing import Any

ES_OK: int
ES_AGAIN: int
ES_ABORTED: int
ES_MISMATCH: int
ES_GONE: int
ES_SILENT: int
ES_BARRIER: int
ES_ALL_REDUCE: int
ES_REDUCE: int
ES_BROADCAST: int
ES_ALL_GATHER: int
ES_GATHER: int
ES_SCATTER: int
ES_REDUCE_SCATTER: int
ES_TAG_BYTES: int
ES_ERROR_BYTES: int

def control_bytes(num_workers: int, slot_bytes: int, /) -> int: ...
def init(base: int, num_workers: int, slot_bytes: int, /) -> None: ...
def describe(base: int, /) -> tuple[int, int] | None: ...
def post(base: int, worker: int, seq: int, tag: str, data: int, num_bytes: int, /) -> None: ...
def collect(
    base: int, worker: int, seq: int, tag: str, out: int, num_bytes: int, spin: int, timeout_ns: int, /
) -> int: ...
def follow(base: int, worker: int, seq: int, spin: int, timeout_ns: int, /) -> int: ...
def last_post(base: int, worker: int, /) -> tuple[int, int, str, int]: ...
def abort_all(base: int, author: int, culprit: int, text: str | bytes, /) -> bool: ...
def aborted(base: int, /) -> tuple[int, str] | None: ...
def clear_abort(base: int, /) -> None: ...
def set_pid(base: int, worker: int, pid: int, /) -> None: ...
def pid(base: int, worker: int, /) -> int: ...
def copy(target: int, source: int, num_bytes: int, /) -> None: ...
def gather(
    target: int,
    bases: int,
    firsts: int,
    starts: int,
    shift: int,
    row_bytes: int,
    num_rows: int,
    rows: Any,  # has a buffer, of int64
    /,
) -> bool: ...
def levels_are(data: int, num_bytes: int, bits: int, count: int, top: int, length: int, /) -> bool: ...
def permutation(target: int, count: int, seed: int, /) -> None: ...
def checksum(data: int, num_bytes: int, /) -> int: ...
def load(word: int, /) -> int: ...
def store(word: int, value: int, /) -> None: ...
def store_all(words: tuple[int, ...], value: int, /) -> None: ...
def tree_reduce(dtype: int, op: int, inputs: tuple[int, ...], merges: bytes, out: int, count: int, /) -> None: ...

class Turn:
    def take(self) -> bool: ...
    def wait(self) -> None: ...
    def leave(self) -> None: ...
    def opened(self) -> None: ...
    def over(self) -> None: ...

class Team:
    number: int
    looks: int
    spin: int
    step_bytes: int
    def __init__(
        self,
        base: int,
        rank: int,
        merges: bytes,
        at_once_bytes: int,
        rings: int,
        ring_bytes: int,
        look: Callable[[int], bool],
        /,
    ) -> None: ...
    def collective(
        self,
        kind: int,
        tag: bytes,
        dtype: int,
        op: int,
        root: int,
        count: int,
        ins: int | tuple[int, ...] | None,
        outs: int | tuple[int, ...] | None,
        timeout_ns: int,
        /,
    ) -> int: ...
    def all_to_all(
        self,
        tag: bytes,
        ins: tuple[int, ...],
        in_bytes: tuple[int, ...],
        outs: tuple[int, ...],
        out_bytes: tuple[int, ...],
        timeout_ns: int,
        /,
    ) -> int: ...
    def close(self) -> None: ...

class Sums:
    timeout_s: float
    def __init__(
        self,
        team: Team,
        turn: Turn,
        is_recording: Callable[[], bool],
        usual: tuple[object, object],
        types: tuple[type, ...],
        done: object,
        failed: Callable[[int, Any, bytes, float], None],
        /,
    ) -> None: ...
    def all_reduce(self, tensors: list[Any], opts: object, /) -> Any | None: ...
    def learn(self, tensor: object, tag: bytes, dtype: int, op: int, count: int, /) -> None: ...

def pack_posts(base: int, seq: int, workers: tuple[int, ...], out: int, capacity: int, /) -> int: ...
def take_posts(base: int, message: int, num_bytes: int, /) -> bool: ...
def mark_seen(mark: int, /) -> int: ...
def mark_bump(mark: int, /) -> None: ...
def mark_wait(mark: int, seen: int, base: int, spin: int, timeout_ns: int, /) -> int: ...
def mail_bytes(num_ranks: int, /) -> int: ...
def mail_fragments(num_bytes: int, /) -> int: ...
def mail_seen(mail: int, rank: int, /) -> int: ...
def mail_bump(mail: int, rank: int, /) -> None: ...
def mail_wait(base: int, mail: int, rank: int, seen: int, spin: int, timeout_ns: int, /) -> int: ...
def mail_push(
    mail: int,
    num_ranks: int,
    source: int,
    target: int,
    tag: int,
    num_bytes: int,
    dtype: int,
    number: int,
    data: int,
    fragments: int,
    /,
) -> int: ...
def mail_head(mail: int, num_ranks: int, source: int, target: int, /) -> tuple[int, int, int, int] | None: ...
def mail_pull(
    mail: int, num_ranks: int, source: int, target: int, num_bytes: int, data: int, fragments: int, /
) -> int: ...
def die_with_parent() -> None: ...
def interrupt(pid: int, number: int, /) -> None: ...
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
