"""What `evenstep verify` compares: digests of the state after every step, and the fingerprint."""

import json
from pathlib import Path
from typing import Any

from evenstep.engine.step import Engine

__all__ = ["DigestWriter"]


class DigestWriter:
    """Writes digests of the state of a run to a file, if one is given; for the first worker.

    Args:
        path: The file; None: write nothing.
        engine: The run's engine.
    """

    def __init__(self, path: Path | None, engine: Engine) -> None:
        self._path, self._engine = path, engine

    def before_step(self) -> None:
        """Write the state that the first step begins with."""
        if not self._engine.version:
            self.after_step()

    def after_step(self) -> None:
        """Write the present state."""
        if self._path is not None and self._engine.group.rank == 0 and self._engine.ledger.took_part:
            self._write({"step": self._engine.version, "digests": self._engine.state.digests()})

    def end(self, fingerprint: str) -> None:
        """Write the fingerprint."""
        if self._path is not None and self._engine.group.rank == 0:
            self._write({"fingerprint": fingerprint})

    def _write(self, record: dict[str, Any]) -> None:
        assert self._path is not None, "callers have checked that there is a path"
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
