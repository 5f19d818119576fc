"""A topology as JSON: what `evenstep topo --out machines.json` writes and people write by hand.

    {"format": 1,
     "links": {"network": {"bandwidth_bytes_per_s": 12.5e9, "latency_s": 15e-6}},
     "machines": [{"name": "node", "count": 1250, "rack_size": 16,
                   "devices": [{"name": "gpu0", "numa": 0, "switch": "a", "speed": 1.0}, ...],
                   "links": [{"between": ["gpu0", "gpu1", ...], "kind": "nvlink"}]}]}

`count` repeats a machine, `rack_size` puts that many of them into a rack; `between` links every pair of its devices.
Everything but names has a default. A "plan" beside the machines was written with them, and is ignored. A mistake is
reported in one sentence that says where it is.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from itertools import combinations
from pathlib import Path
from typing import Any

from evenstep.core.errors import ConfigError
from evenstep.plan.topology import LINKS, Device, Link, LinkKind, Machine, Topology
from evenstep.topology.smi import from_smi

__all__ = ["from_json", "from_text", "read_file", "to_json"]

_FORMAT = 1
_MOST = 1_000_000  # machines of one kind
_LARGEST = 1e30  # the largest figure, so that sums of them stay finite
_DEVICE = {field.name: field.default for field in fields(Device)}


def read_file(path: Path) -> Topology:
    """Read a JSON file, or one that holds the text of `nvidia-smi topo -m`.

    Raises:
        ConfigError: It cannot be read, or what is in it makes no sense.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{path} cannot be read: {reason}; name a JSON file of machines") from error
    return from_text(text, str(path))


def from_text(text: str, name: str) -> Topology:
    """A topology from a text: JSON, or what `nvidia-smi topo -m` says. `name` says in errors where the text is from.

    Raises:
        ConfigError: What is in it makes no sense.
    """
    text = text.removeprefix("\ufeff")  # some editors begin a file with it
    try:
        if text.lstrip().startswith("{"):
            return from_json(json.loads(text))
        if "GPU0" in text:
            return from_smi(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    raise ConfigError(f"{name} is neither a JSON object of machines nor the text of `nvidia-smi topo -m`")


def to_json(topology: Topology) -> dict[str, Any]:
    """The inverse of `from_json`."""
    return {
        "format": _FORMAT,
        "links": {str(link.kind): _figures(link) for link in LINKS for link in (topology.usual(link.kind),)},
        "machines": [
            {
                "name": machine.name,
                **({} if machine.rack is None else {"rack": machine.rack}),
                "devices": [
                    {key: value for key, value in asdict(device).items() if value != _DEVICE[key]}
                    for device in machine.devices
                ],
                "links": [
                    {
                        "between": [machine.devices[a].name, machine.devices[b].name],
                        "kind": str(link.kind),
                        **_figures(link),
                    }
                    for a, b, link in machine.links
                ],
            }
            for machine in topology.machines
        ],
    }


def _figures(link: Link) -> dict[str, float]:
    return {"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s, "latency_s": link.latency_s}


def from_json(value: Any) -> Topology:
    """A topology from what `json.loads` gives.

    Raises:
        ConfigError: Something is missing, unknown or out of range; the message says where.
    """
    top = _Object(value, "the file", ("format", "links", "machines", "plan"))
    if top.value.get("format") != _FORMAT:
        raise ConfigError(f'"format" is {top.value.get("format")!r}, expected {_FORMAT}')
    table = _Object(top.value.get("links", {}), "links", tuple(LinkKind))
    links = {link.kind: link for link in LINKS}
    for word in table.value:
        kind = LinkKind(word)
        links[kind] = _link(table.inner(word, ("bandwidth_bytes_per_s", "latency_s")), links[kind])
    machines: list[Machine] = []
    for item in top.items("machines", ("name", "count", "rack", "rack_size", "devices", "links")):
        machines += _machines(item, links)
    return Topology(tuple(machines), tuple(links.values()))


class _Object:
    """A JSON object that knows its place in the file, so that an error can name it."""

    def __init__(self, value: Any, where: str, known: tuple[str, ...]) -> None:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is {_short(value)}, expected an object {{...}}")
        unknown = [key for key in value if key not in known]
        if unknown:
            raise ConfigError(f"{where} has {unknown[0]!r}, expected only {', '.join(known)}")
        self.value: dict[str, Any] = value
        self.where = where

    def at(self, key: str) -> str:
        """The place of a value of this object."""
        return key if self.where == "the file" else f"{self.where}.{key}"

    def inner(self, key: str, known: tuple[str, ...]) -> "_Object":
        """An object in this one."""
        return _Object(self.value[key], self.at(key), known)

    def items(self, key: str, known: tuple[str, ...]) -> Iterator["_Object"]:
        """The objects of a list in this one."""
        found = self.value.get(key, [])
        if not isinstance(found, list):
            raise ConfigError(f"{self.at(key)} is {_short(found)}, expected a list [...]")
        for number, item in enumerate(found):
            yield _Object(item, f"{self.at(key)}[{number}]", known)

    def text(self, key: str) -> str | None:
        """A text, or None if there is none."""
        found = self.value.get(key)
        if found is not None and (not isinstance(found, str) or not found or not found.isprintable()):
            raise ConfigError(f"{self.at(key)} is {_short(found)}, expected a printable text")
        return found

    def name(self) -> str:
        """The name, which must be there."""
        found = self.text("name")
        if found is None:
            raise ConfigError(f"{self.where} has no name; expected one")
        return found

    def whole(self, key: str, default: int, low: int) -> int:
        """A whole number."""
        found = self.value.get(key, default)
        if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= _MOST:
            bound = f"up to {_MOST}" if isinstance(found, int) and found > _MOST else f"of at least {low}"
            raise ConfigError(f"{self.at(key)} is {_short(found)}, expected a whole number {bound}")
        return found

    def number(self, key: str, default: float, *, zero: bool = False) -> float:
        """A number above 0, or of at least 0."""
        found = self.value.get(key, default)
        fits = isinstance(found, int | float) and not isinstance(found, bool)
        if not fits or not (found > 0 or (zero and found == 0)) or found > _LARGEST:
            bound = f"up to {_LARGEST:g}" if fits and found > _LARGEST else "of at least 0" if zero else "above 0"
            raise ConfigError(f"{self.at(key)} is {_short(found)}, expected a number {bound}")
        return float(found)

    def truth(self, key: str) -> bool:
        """True or false; false if it is not there."""
        found = self.value.get(key, False)
        if not isinstance(found, bool):
            raise ConfigError(f"{self.at(key)} is {_short(found)}, expected true or false")
        return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _link(item: _Object, usual: Link) -> Link:
    return Link(
        usual.kind,
        item.number("bandwidth_bytes_per_s", usual.bandwidth_bytes_per_s),
        item.number("latency_s", usual.latency_s, zero=True),
    )


def _machines(item: _Object, usual: Mapping[LinkKind, Link]) -> list[Machine]:
    name, count = item.name(), item.whole("count", 1, 1)
    rack, rack_size = item.text("rack"), item.whole("rack_size", 0, 0)
    if rack is not None and rack_size:
        raise ConfigError(f"{item.where} has both rack and rack_size; give one of the two")
    devices = tuple(
        Device(
            each.name(),
            each.whole("socket", 0, 0),
            each.whole("numa", 0, 0),
            each.text("switch"),
            each.text("board"),
            each.number("speed", 1.0),
            each.truth("core"),
        )
        for each in item.items("devices", tuple(_DEVICE))
    )
    places = {device.name: place for place, device in enumerate(devices)}
    links = tuple(
        (a, b, link)
        for each in item.items("links", ("between", "kind", "bandwidth_bytes_per_s", "latency_s"))
        for link in (_link(each, usual[_kind(each)]),)
        for a, b in combinations(_between(each, places), 2)
    )
    return [
        Machine(
            name if count == 1 else f"{name}{number}",
            devices,
            links,
            f"{name}-rack{number // rack_size}" if rack_size else rack,
        )
        for number in range(count)
    ]


def _kind(item: _Object) -> LinkKind:
    inside = [kind for kind in LinkKind if kind not in (LinkKind.NETWORK, LinkKind.SPINE)]
    if item.value.get("kind") not in inside:
        raise ConfigError(f"{item.at('kind')} is {_short(item.value.get('kind'))}, expected one of {', '.join(inside)}")
    return LinkKind(item.value["kind"])


def _between(item: _Object, places: Mapping[str, int]) -> list[int]:
    names = item.value.get("between")
    if not isinstance(names, list) or len(names) < 2 or len({str(name) for name in names}) < len(names):
        raise ConfigError(f"{item.at('between')} is {_short(names)}, expected the names of two or more devices")
    for name in names:
        if not isinstance(name, str) or name not in places:
            raise ConfigError(f"{item.at('between')} names {name!r}, which is not a device of this machine")
    return [places[name] for name in names]
