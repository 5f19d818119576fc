"""Process groups that are made, used and destroyed endlessly; and jobs whose ranks must notice that one is gone.

As a script: the ranks, which live for the whole time, and the parent that starts the short jobs beside them.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import FileStore

import evenstep.distributed  # noqa: F401  # registers the backend
from evenstep.core.errors import EvenstepError, PeerError, SilenceError
from evenstep.native import core
from evenstep.testing.soak.burden import SoakResult, end, start

__all__ = ["Grouped", "main"]

_RANKS = 3
_PATIENCE_S = 20.0  # how long the others may take to notice that a rank is gone
_SILENCE_S = 1.0  # the timeout of a job whose rank is stopped
_PAUSE_S = 1.0  # between two of these jobs


class Grouped:
    """See `Burden`.

    Args:
        directory: An empty one.
        seed: Seeds what is done.
    """

    name = "process groups"

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory, self._seed = directory, seed
        self._parent: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """See `Burden`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._parent = start(["-m", __spec__.name, str(self._directory), str(self._seed)], self._log)

    @property
    def _log(self) -> Path:
        return self._directory / "ranks.log"

    def turn(self) -> None:
        """See `Burden`. Nothing to do: it goes on by itself."""

    def subjects(self) -> Mapping[str, Sequence[int]]:
        """See `Burden`."""
        assert self._parent is not None, "a burden is begun before it is used"
        with contextlib.suppress(OSError, ValueError):
            ranks: list[int] = json.loads((self._directory / "ranks.json").read_text())
            return {"process groups: ranks": ranks, "process groups: parent": [self._parent.pid]}
        return {}

    def finish(self) -> SoakResult:
        """See `Burden`."""
        assert self._parent is not None, "a burden is begun before it is used"
        code = end(self._parent)
        text = self._log.read_text(errors="replace")
        try:
            groups, lost, slowest_s, wrong = json.loads(text.splitlines()[-1])
        except (ValueError, IndexError):
            groups, lost, slowest_s, wrong = 0, 0, 0.0, [f"exit code {code}"]
        did = f"{groups} groups made and destroyed, {lost} ranks killed or stopped"
        result = f"all sums right, each loss noticed, in {slowest_s:.2f} s at most" if not wrong else "; ".join(wrong)
        return SoakResult(code == 0 and not wrong, did, result[:200], text)


def main() -> int:
    """Run until SIGTERM as the parent; then print [groups, lost ranks, slowest notice of a loss, what was wrong]."""
    directory, seed = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    over: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: over.append(number))
    counts = directory / "counts"
    counts.mkdir()
    store = str(directory / "store")
    ranks = [_fork(partial(_make_groups, store, rank, seed, counts / str(rank))) for rank in range(_RANKS)]
    (directory / "ranks.json").write_text(json.dumps(ranks))
    lost, slowest_s, wrong = 0, 0.0, list[str]()
    while not over and all(_is_running(rank) for rank in ranks):
        with tempfile.TemporaryDirectory() as place:
            seconds, said = _lose_a_rank(Path(place), seed + lost)
        lost, slowest_s, wrong = lost + 1, max(slowest_s, seconds), wrong + said
        time.sleep(_PAUSE_S)
    (directory / "over").touch()
    codes = [_code(rank) for rank in ranks]
    if any(codes):
        wrong.append(f"ranks ended with {codes}")
    groups = sum(int(path.read_text()) for path in counts.iterdir()) // _RANKS
    print(json.dumps([groups, lost, slowest_s, wrong[:5]]), flush=True)
    return 0


def _make_groups(store: str, rank: int, seed: int, count: Path) -> int:
    """Run as a rank: in every round all make some groups, use them and destroy them. All draw the same numbers."""
    init(store, rank, _RANKS, 120.0)
    dice, made = random.Random(seed), 0
    over = count.parent.parent / "over"
    while not _all_agree(over.exists()):
        members = sorted(dice.sample(range(_RANKS), dice.randint(1, _RANKS)))
        groups = [dist.new_group(members) for _ in range(dice.randint(1, 3))]
        made += len(groups)
        for group in groups:
            size = dice.choice((1, 1000, 300_000))
            if rank in members:
                _use(group, members, rank, size)
        for group in groups:
            if rank in members:
                dist.destroy_process_group(group)
        count.write_text(str(made))
    dist.destroy_process_group()
    return 0


def init(store: str, rank: int, size: int, timeout_s: float) -> None:
    """Make the default group of some processes that share a file."""
    where = FileStore(store, size)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("evenstep", store=where, rank=rank, world_size=size, timeout=timeout)


def _all_agree(over: bool) -> bool:
    """Whether any rank says that it is over."""
    found = torch.tensor([int(over)])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def _use(group: "dist.ProcessGroup", members: Sequence[int], rank: int, size: int) -> None:
    mine = torch.full((size,), float(rank + 1))
    work = dist.all_reduce(mine, group=group, async_op=True)
    assert work is not None, "this rank is in the group"
    work.wait()
    if not (mine == sum(members) + len(members)).all():
        raise AssertionError(f"a sum of {size} over ranks {members} is wrong: {mine}")
    after, before = (members[(members.index(rank) + step) % len(members)] for step in (1, -1))
    if after != rank:
        found = torch.empty(size)
        sent = dist.isend(torch.full((size,), float(rank)), after, group=group)
        dist.recv(found, before, group=group)
        assert sent is not None, "this rank is in the group"
        sent.wait()
        if not (found == before).all():
            raise AssertionError(f"a message of {size} from rank {before} is wrong: {found}")


def _lose_a_rank(place: Path, seed: int) -> tuple[float, list[str]]:
    """Run a separate job, of which one rank is killed or stopped; how long the others took, and what was wrong."""
    dice = random.Random(seed)
    stops = dice.random() < 0.3
    loser, large = dice.randrange(_RANKS), dice.random() < 0.5
    ranks = [_fork(partial(_be_left, place, rank, loser, stops, large)) for rank in range(_RANKS)]
    deadline, wrong = time.monotonic() + _PATIENCE_S, []
    others = [pid for rank, pid in enumerate(ranks) if rank != loser]
    while any(map(_is_running, others)) and time.monotonic() < deadline:
        time.sleep(0.01)
    if any(map(_is_running, others)):
        wrong.append(f"job {seed} waited for more than {_PATIENCE_S:g} s")
    for pid in ranks:
        if pid not in others or _is_running(pid):
            os.kill(pid, signal.SIGKILL)
    codes = [_code(pid) for pid in ranks]
    wrong += [f"job {seed}: rank {rank} ended with {code}" for rank, code in enumerate(codes) if rank != loser and code]
    times = [float(path.read_text()) for path in place.glob("noticed.*")]
    return max(times, default=0.0) - (_SILENCE_S if stops else 0.0), wrong


def _be_left(place: Path, rank: int, loser: int, stops: bool, large: bool) -> int:
    """Run as a rank of such a job. 0: it noticed, and named the lost rank."""
    init(str(place / "store"), rank, _RANKS, _PATIENCE_S)
    dist.barrier()
    dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=_SILENCE_S if stops else _PATIENCE_S))
    size = 1_000_000 if large else 1000
    if rank == loser:
        dist.isend(torch.ones(size), (rank + 1) % _RANKS)  # if it is large, the rank is lost in the middle of it
        os.kill(os.getpid(), signal.SIGSTOP if stops else signal.SIGKILL)
        time.sleep(_PATIENCE_S)
    begun = time.monotonic()
    try:
        if large and rank == (loser + 1) % _RANKS:
            dist.recv(torch.empty(size), loser)
        for _ in range(1000):
            dist.all_reduce(torch.ones(size))
    except (PeerError, SilenceError) as error:
        (place / f"noticed.{rank}").write_text(str(time.monotonic() - begun))
        return 0 if f"rank {loser} " in str(error) else 3
    except EvenstepError:
        return 4
    return 5


def _fork(body: Callable[[], int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        core.die_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = body()
    finally:
        os._exit(code)


def _is_running(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
