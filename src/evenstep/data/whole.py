"""A whole global batch that the script brings itself, cut into rows.

What its samples are is read off the batch:

- Tensors and arrays have one row for each sample. Those without dimensions, numbers, strings and None belong to no
  particular sample and go to every part.
- Mappings, named tuples, data classes and the outermost list or tuple are structure.
- A list or tuple inside these holds the samples if its length is the number of rows of the tensors, and is structure
  if it holds tensors with that many rows. Where no tensor says how many samples there are, the lists do.

Everything must have the same number of samples, and what can be read in two ways is refused: a batch cut along the
wrong dimension trains like any other, and nobody would notice.
"""

import enum
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from evenstep.core.errors import ConfigError
from evenstep.data.batch import Batch
from evenstep.data.nested import children, is_sequence, rebuild
from evenstep.plan.placement import cut

__all__ = ["WholeBatch", "cut_whole"]

_PLAIN = (str, bytes, int, float, complex, type(None), enum.Enum, np.generic, torch.dtype, torch.device)

Named = tuple[str, Any]  # how a value is written, such as batch['x'][0], and the value


class WholeBatch:
    """A batch, and how it is cut.

    Args:
        batch: Any structure of tensors, arrays, lists and plain values.

    Attributes:
        num_rows: How many samples it has.

    Raises:
        ConfigError: It has no samples, or it is unclear what they are.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._lists_of_samples: set[int] = set()  # by id
        found = list(_in_structure("batch", batch, outermost=True))
        arrays = [(name, value) for name, value in found if _is_array(value)]
        lists = [(name, value) for name, value in found if not _is_array(value)]
        in_lists = [each for name, value in lists for each in _arrays_in(name, value)]
        self._first: Named = ("batch", batch)  # what says how many samples there are
        if arrays:
            self._first = arrays[0]
        elif len({len(value) for _, value in in_lists}) == 1:  # all with equally many rows: several tensors in a list
            self._first = in_lists[0]
            self._refuse_samples(lists)
        elif lists:
            self._first = lists[0]
        elif is_sequence(batch) and batch:
            self._lists_of_samples.add(id(batch))
        else:
            raise ConfigError("the batch holds no tensor, array or list with samples in its first dimension")
        self.num_rows = len(self._first[1])
        if not self.num_rows:
            raise ConfigError(f"{self._first[0]} is empty; expected at least one sample")
        if id(batch) not in self._lists_of_samples:
            self._refuse_samples([("batch", batch)], whatever_length=not (arrays or in_lists))
        for name, value in found:
            self._read(name, value)

    def part(self, first: int, end: int) -> Any:
        """Samples [first, end)."""
        return self._cut(self._batch, first, end)

    def _cut(self, value: Any, first: int, end: int) -> Any:
        if id(value) in self._lists_of_samples or (_is_array(value) and value.ndim):
            return value[first:end]
        return rebuild(value, lambda item: self._cut(item, first, end))

    def _read(self, name: str, value: Any) -> None:
        """Check that a value has as many samples as the rest; find out what a list holds."""
        inside = [] if _is_array(value) else list(_arrays_in(name, value))
        is_structure = bool(inside) and all(len(array) == self.num_rows for _, array in inside)
        if len(value) != self.num_rows and not is_structure:
            where, first = self._first
            raise ConfigError(
                f"{where} has {len(first)} samples but {name} has {len(value)}; everything in a batch must have as "
                "many (what belongs to no sample, the step function takes from outside the batch)"
            )
        if _is_array(value):
            return
        if len(value) == self.num_rows:
            if is_structure and self.num_rows > 1:
                _refuse_either(name, value, self.num_rows)
            self._lists_of_samples.add(id(value))
        else:
            for each in _in_structure(name, value, outermost=True):
                self._read(*each)

    def _refuse_samples(self, lists: Sequence[Named], *, whatever_length: bool = False) -> None:
        """Refuse lists that were taken for structure but look like samples: all of one kind, and more than the rows.

        Raises:
            ConfigError: There is such a list.
        """
        num_rows = len(self._first[1])
        for name, value in lists:
            if is_sequence(value) and len(value) > 1 and (whatever_length or len(value) > num_rows) and _alike(value):
                _refuse_either(name, value, num_rows)


def cut_whole(batch: Any, name: str, shards: int, device: str) -> Batch:
    """A whole batch as shards compute it, cut by position.

    Args:
        batch: Any structure, see `WholeBatch`.
        name: What messages call it.
        shards: How many there are.
        device: Where parts go.

    Raises:
        ConfigError: It is unclear how to cut it.
    """
    whole = WholeBatch(batch)
    spans = cut(whole.num_rows, shards)
    return Batch(name, [end - first for first, end in spans], lambda k: whole.part(*spans[k]), {}, device, whole=batch)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _check_dense(name: str, value: Tensor | np.ndarray[Any, Any]) -> None:
    if isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided):
        raise ConfigError(f"{name} is a {value.layout} tensor, whose rows cannot be cut; pass a dense one")


def _in_structure(name: str, value: Any, *, outermost: bool = False) -> Iterator[Named]:
    """The arrays and lists of a structure, without what is in the lists."""
    held = children(value)
    if _is_array(value):
        _check_dense(name, value)
        if value.ndim:
            yield name, value
    elif held is None:
        if not isinstance(value, _PLAIN):
            raise ConfigError(
                f"{name} is a {type(value).__name__}, of which it cannot be told whether it has samples; pass tensors, "
                "arrays or lists (what belongs to no sample, the step function takes from outside the batch)"
            )
    elif is_sequence(value) and not outermost:
        if value:
            yield name, value
    else:
        for key, item in held.items():
            yield from _in_structure(name + key, item)


def _arrays_in(name: str, value: Any) -> Iterator[Named]:
    """All arrays with dimensions, however deep."""
    if _is_array(value):
        if value.ndim:
            yield name, value
    else:
        for key, item in (children(value) or {}).items():
            yield from _arrays_in(name + key, item)


def _alike(items: Sequence[Any]) -> bool:
    """Whether all items are of one kind, as samples are."""
    return len({_kind(item) for item in items}) == 1


def _kind(value: Any) -> Any:
    if _is_array(value):
        return (value.ndim, value.dtype)
    held = children(value)
    if held is None:
        return type(value)
    kinds = map(_kind, held.values()) if is_sequence(value) else ((key, _kind(item)) for key, item in held.items())
    return (type(value), frozenset(kinds))


def _refuse_either(name: str, value: Sequence[Any], num_rows: int) -> NoReturn:
    count = len(value)
    raise ConfigError(
        f"{name} is a {type(value).__name__} of {count} values of one kind: it may hold {count} samples, or {count} "
        f"columns with {num_rows} samples each; name the columns in a dict, stack the samples (torch.stack), or if "
        f"their sizes differ pass something with one row for each beside them: (samples, torch.arange({count}))"
    )
