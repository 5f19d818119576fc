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

__all__ = ["Display", "Pipe", "Progress"]


@dataclass(frozen=True)
class Progress:
    """Where the batches are."""

    epoch: int
    num_epochs: int
    batch: int
    num_batches: int
    num_samples: int
    loss: float | None
    metrics: dict[str, float]


class Display:
    """Shows progress on a stream."""

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
            if self._bar is None:
                bar = "{desc} {bar} {n_fmt}/{total_fmt} [{elapsed}<{remaining}] {postfix}"
                self._bar = tqdm(
                    desc=head, total=progress.num_batches, bar_format=bar, file=self._stream, dynamic_ncols=True
                )
            self._bar.set_postfix_str(f"{tail}  {rate:.0f} samples/s", refresh=False)
            self._bar.update(progress.batch - self._bar.n)
        elif progress.batch == progress.num_batches:
            self.write(f"{head}  {progress.num_batches} steps  {tail}  {rate:.0f} samples/s")

    def write(self, line: str, stream: TextIO | None = None) -> None:
        """Write a line beside the bar."""
        tqdm.write(line, file=stream or self._stream)

    def close(self) -> None:
        """End the bar, leaving it as it was."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


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
