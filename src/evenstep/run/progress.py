"""One progress display for a run: on a terminal a bar, elsewhere a line at the end of each epoch.

Under the launcher the workers own no terminal: worker 0 sends what it would show as JSON lines, and the launcher shows
it with the same `Display`.
"""

import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from tqdm import tqdm

from evenstep.core.events import send
from evenstep.core.output import unheard

__all__ = ["Display", "Merger", "Pipe", "Progress"]


@dataclass(frozen=True)
class Progress:
    """Where the batches are; loss and metrics are means over `weight` samples. 0 batches: their number is unknown."""

    epoch: int
    num_epochs: int
    batch: int
    num_batches: int
    num_samples: int
    loss: float | None
    metrics: dict[str, float]
    weight: int = 0


class Display:
    """Shows progress on a stream, even if nobody reads it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._bar: tqdm[Any] | None = None
        self._epoch = -1
        self._begin = time.monotonic()
        self._samples = 0

    def show(self, progress: Progress) -> None:
        """Show where the batches are now."""
        if progress.epoch != self._epoch:
            self.close()
            self._epoch, self._begin, self._samples = progress.epoch, time.monotonic(), 0
        self._samples += progress.num_samples
        rate = self._samples / max(time.monotonic() - self._begin, 1e-9)
        head = f"epoch {progress.epoch + 1}/{progress.num_epochs}"
        figures = {} if progress.loss is None else {"loss": progress.loss, **progress.metrics}
        tail = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        if self._stream.isatty():
            with unheard(self._stream):
                if self._bar is None:
                    bar = "{desc} {bar} {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
                    self._bar = tqdm(
                        desc=head,
                        total=progress.num_batches or None,
                        bar_format=bar,
                        file=self._stream,
                        dynamic_ncols=True,
                    )
                self._bar.set_postfix_str(f"{tail}  {rate:.0f} samples/s", refresh=False)
                self._bar.update(progress.batch - self._bar.n)
        elif progress.batch == progress.num_batches > 0:
            self.write(f"{head}  {progress.num_batches} steps  {tail}  {rate:.0f} samples/s")

    def write(self, line: str, stream: TextIO | None = None) -> None:
        """Write a line beside the bar."""
        stream = stream or self._stream
        with unheard(stream, self._stream):
            tqdm.write(line, file=stream)
            stream.flush()

    def close(self) -> None:
        """End the bar, leaving it as it is."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with unheard(self._stream):
                bar.close()


class Merger:
    """Merges the progress of groups, which may be in different epochs: shows the first that not all have finished."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._series: dict[int, tuple[int, int, int]] = {}  # by group: which `batches`, and where there
        self._epochs: dict[tuple[int, int], dict[int, Progress]] = {}
        self._samples: dict[tuple[int, int], int] = {}

    def add(self, group: int, progress: Progress) -> list[Progress]:
        """Take in the progress of a group; return what there is to show."""
        series, epoch, batch = self._series.get(group, (0, 0, 0))
        if (progress.epoch, progress.batch) < (epoch, batch):  # it iterates over its data again
            series += 1
        self._series[group] = (series, progress.epoch, progress.batch)
        key = (series, progress.epoch)
        self._epochs.setdefault(key, {})[group] = progress
        self._samples[key] = self._samples.get(key, 0) + progress.num_samples
        shown: list[Progress] = []
        while self._epochs:
            first = min(self._epochs)
            shown.append(self._merged(first))
            if not self._is_over(first):
                break
            del self._epochs[first], self._samples[first]
        return shown

    def _is_over(self, key: tuple[int, int]) -> bool:
        here = self._epochs[key].values()
        return len(here) == self._groups and all(p.batch == p.num_batches for p in here)

    def _merged(self, key: tuple[int, int]) -> Progress:
        here = list(self._epochs[key].values())
        counted = [p for p in here if p.loss is not None and p.weight]
        weight = sum(p.weight for p in counted)
        names = sorted(set.intersection(*(set(p.metrics) for p in counted))) if counted else []
        loss = sum(p.weight * (p.loss or 0.0) for p in counted) / weight if counted else None
        metrics = {name: sum(p.weight * p.metrics[name] for p in counted) / weight for name in names}
        batch, num_batches = sum(p.batch for p in here), sum(p.num_batches for p in here)
        if len(here) < self._groups:
            num_batches += 1  # a group has yet to report: it is not over
        samples, self._samples[key] = self._samples[key], 0
        return Progress(here[0].epoch, here[0].num_epochs, batch, num_batches, samples, loss, metrics, weight)


class Pipe:
    """Sends what a `Display` would show to the launcher."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pending = 0
        self._last = 0.0

    def show(self, progress: Progress) -> None:
        """Send where the batches are, at most ten times a second."""
        self._pending += progress.num_samples
        at_an_end = progress.num_samples == 0 or progress.batch == progress.num_batches
        if at_an_end or time.monotonic() - self._last > 0.1:
            send(self._fd, {"progress": asdict(progress) | {"num_samples": self._pending}})
            self._pending, self._last = 0, time.monotonic()

    def close(self) -> None:
        """Nothing is held open here."""
