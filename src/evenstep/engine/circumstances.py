"""What a step is done under besides its batch: options, limits, modes, and what its function sees of the script's own.

It must be the same on all workers, and the same again when the script is run again, by a worker that joins later or a
run that is resumed. So workers compare it in every step, and the journal keeps a digest of it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evenstep.core.errors import MismatchError
from evenstep.engine.beside import Beside
from evenstep.engine.clipping import Clipping
from evenstep.engine.models import Models
from evenstep.engine.optimizer_set import Trained

__all__ = ["REMEDY", "Circumstances", "Facts", "compare_past", "digests"]

Facts = dict[str, Any]
"""What must be the same, by name."""

REMEDY = (
    "a worker that joins later, and a run that is resumed, run the script again, when parameters are others: copy a "
    "model before run.prepare; what is taken from parameters between steps (a validation of the script's own, an "
    "average) belongs in run.evaluate or run.once, or in a model that is prepared too and changed in run.edit; layers "
    "are frozen and switched between steps, not in the step function"
)
_MOST_NAMES = 8


class Circumstances:
    """Looks at them when a step begins.

    Args:
        models: The prepared models.
    """

    def __init__(self, models: Models) -> None:
        self._slots, self.beside = models.slots, Beside(models.slots)
        self._last: dict[str, tuple[Any, str]] = {}  # they seldom change

    def of(
        self, function: Callable[..., Any], trained: Trained, clipping: Clipping, scale: float | None, version: int
    ) -> Facts:
        """Those of a step that is about to be done."""
        frozen = [n for n, p in zip(trained.names, trained.parameters, strict=True) if not p.requires_grad]
        return {
            "options": [each.hyperparameters() for each in trained.optimizers],
            "clipping": [clipping.norm, clipping.value, clipping.order],
            "scale": scale,
            "frozen parameters": _short(frozen),
            "layers in eval mode": _short(self._slots.in_eval_mode()),
            **self.beside.look(function, version),
        }

    def digests(self, facts: Facts) -> dict[str, str]:
        """As `digests`, quickly where they are those of the last step."""
        for name, value in facts.items():
            if name not in self._last or self._last[name][0] != value:
                self._last[name] = value, _digest(value)
        return {name: self._last[name][1] for name in facts}


def _short(names: Sequence[str]) -> Any:
    return names if len(names) <= _MOST_NAMES else f"{len(names)}, {names[0]} ... ({_digest(names)})"


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, default=repr).encode(), digest_size=4).hexdigest()


def digests(facts: Facts) -> dict[str, str]:
    """Short words for all of them, for the journal."""
    return {name: _digest(value) for name, value in facts.items()}


def compare_past(what: str, past: Mapping[str, str], facts: Facts) -> None:
    """Check that a script that is run again comes to an operation under the same circumstances.

    Args:
        what: The operation, in words.
        past: What the journal has of it.
        facts: Those of now.

    Raises:
        MismatchError: It does not.
    """
    for name, found in digests(facts).items():
        if past.get(name, found) != found:
            raise MismatchError(f"{what} was done with {name} other than now ({facts[name]}): {REMEDY}")
