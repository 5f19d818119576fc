"""The text of `nvidia-smi topo -m` as a topology."""

import re
from collections.abc import Sequence
from dataclasses import replace

from evenstep.core.errors import ConfigError
from evenstep.plan.topology import LINKS, Device, Link, LinkKind, Machine, Topology

__all__ = ["NVLINK_BYTES_PER_S", "from_smi"]

NVLINK_BYTES_PER_S = 25e9
"""What one NVLink carries in each direction, from its second generation to the fourth; the text does not say which."""

_USUAL = {link.kind: link for link in LINKS}
_CODES = {
    "PSB": LinkKind.BOARD,
    "PIX": LinkKind.SWITCH,
    "PXB": LinkKind.SWITCH,
    "PHB": LinkKind.BRIDGE,
    "NODE": LinkKind.BRIDGE,
    "SYS": LinkKind.SOCKET,
    "SOC": LinkKind.SOCKET,
}
_ESCAPES = re.compile(r"\x1b?\[[0-9;]*m")  # text copied from a terminal may have lost the first character


def from_smi(text: str, name: str = "machine") -> Topology:
    """Read the first matrix of a text; what is not about GPUs (network cards, the legend) is ignored.

    Raises:
        ConfigError: There is no matrix, or a code in it is unknown.
    """
    lines = [line.split() for line in _ESCAPES.sub("", text).splitlines()]
    starts = (n for n, words in enumerate(lines) if words and words[0] == "GPU0" and words[1:2] != ["X"])
    start = next(starts, None)
    if start is None:
        raise ConfigError("no line of the text names GPU0, GPU1, ...; expected the output of `nvidia-smi topo -m`")
    header = lines[start]
    columns = header[: header.index("CPU")] if "CPU" in header else header
    places = {column: number for number, column in enumerate(columns) if re.fullmatch(r"GPU\d+", column)}
    rows: dict[str, list[str]] = {}
    for words in lines[start + 1 :]:
        if words and words[0] in places:
            rows.setdefault(words[0], words[1:])
    missing = [gpu for gpu in places if len(rows.get(gpu, ())) < len(columns)]
    if missing:
        raise ConfigError(f"the line of {missing[0]} has fewer than {len(columns)} entries; expected a whole matrix")
    gpus = list(places)
    links = tuple(
        (a, b, _link(rows[gpus[a]][places[gpus[b]]], gpus[a], gpus[b]))
        for a in range(len(gpus))
        for b in range(a + 1, len(gpus))
    )
    nodes = _numa_nodes([rows[gpu][len(columns) :] for gpu in gpus], header) or _components(len(gpus), links)
    devices = tuple(Device(gpu.lower(), node, node) for gpu, node in zip(gpus, nodes, strict=True))
    return Topology((Machine(name, devices, links),))


def _link(code: str, a: str, b: str) -> Link:
    if found := re.fullmatch(r"NV(\d+)", code):
        return replace(_USUAL[LinkKind.NVLINK], bandwidth_bytes_per_s=max(int(found[1]), 1) * NVLINK_BYTES_PER_S)
    if code not in _CODES:
        raise ConfigError(f"{code!r} between {a} and {b}; expected NV#, {', '.join(_CODES)}")
    return _USUAL[_CODES[code]]


def _numa_nodes(rests: Sequence[list[str]], header: list[str]) -> list[int] | None:
    """The column `NUMA Affinity`, or otherwise the column `CPU Affinity`; None if neither is there for every GPU.

    Counted from the right: a job that may not use the cores next to a GPU finds the column `CPU Affinity` empty.
    """
    if "NUMA" in header:
        column = -2 if header[-1] == "ID" else -1
        if all(len(rest) >= -column and rest[column].isdigit() for rest in rests):
            return [int(rest[column]) for rest in rests]
    cores = [rest[0] if rest and rest[0][0].isdigit() else None for rest in rests]
    if None in cores or "CPU" not in header:
        return None
    return [list(dict.fromkeys(cores)).index(core) for core in cores]


def _components(count: int, links: Sequence[tuple[int, int, Link]]) -> list[int]:
    """Devices that meet without the link between sockets are in one NUMA node."""
    nodes = list(range(count))
    apart = any(link.kind is LinkKind.SOCKET for _, _, link in links)
    for a, b, link in links:
        if link.kind is not LinkKind.SOCKET and (link.kind is not LinkKind.NVLINK or not apart):
            low, high = sorted((nodes[a], nodes[b]))
            nodes = [low if node == high else node for node in nodes]
    numbers = {node: number for number, node in enumerate(sorted(set(nodes)))}
    return [numbers[node] for node in nodes]
