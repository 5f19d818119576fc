"""Reading a checkpoint once for all workers: it need not exist on other machines."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from evenstep.core.errors import CheckpointError
from evenstep.engine.form import Form
from evenstep.exchange.group import Group

__all__ = ["read_for_all"]


def read_for_all(
    group: Group, tag: str, read: Callable[[], tuple[dict[str, Any], dict[str, Tensor]]]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Let the first worker read a checkpoint for all: the others get its facts, and its tensors without values.

    All workers must call this alike, inside an operation. An error in reading becomes a fact called "failure".
    """
    facts: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    if group.rank == 0:
        try:
            facts, tensors = read()
        except CheckpointError as error:
            facts = {"failure": str(error)}
    facts, forms = group.gather_json(tag, [facts, {name: Form.of(t).pack() for name, t in tensors.items()}])[0]
    if group.rank != 0:
        tensors = {name: Form.unpack(form).without_values() for name, form in forms.items()}
    return facts, tensors
