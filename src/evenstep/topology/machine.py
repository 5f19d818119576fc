"""This machine as a topology: sockets, NUMA nodes and PCI from sysfs, NVLink and boards from NVML if available.

Devices are the GPUs if there are any, otherwise the cores that this process may use. NVML is asked through
`nvidia-ml-py` (`pip install nvidia-ml-py`), if that is installed and finds a driver; otherwise sysfs has to do.
"""

import importlib
import os
import platform
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from evenstep.core.errors import ConfigError
from evenstep.plan.topology import LINKS, Device, Link, LinkKind, Machine, Topology
from evenstep.topology.smi import NVLINK_BYTES_PER_S

__all__ = ["read_cores", "read_machine"]

_SYSFS = Path("/sys")
_DISPLAYS = ("0x0300", "0x0302", "0x0380", "0x1200")  # VGA, 3D, other displays, accelerators
_MAKERS = ("0x10de", "0x1002")  # NVIDIA, AMD
_USUAL = {link.kind: link for link in LINKS}
_MOST_LINKS = 36


def read_machine(sysfs: Path = _SYSFS) -> Topology:
    """This machine: its GPUs, or its cores where there are none.

    Raises:
        ConfigError: sysfs does not say which cores there are.
    """
    gpus = _gpus(sysfs)
    if not gpus:
        return read_cores(sysfs)
    addresses, links = list(gpus), tuple[tuple[int, int, Link], ...]()
    nvml = _nvml()
    if nvml is not None:
        addresses, links = _ask_nvml(nvml, gpus)
    devices = tuple(gpus[address] for address in addresses)
    return Topology((Machine(platform.node() or "machine", devices, links),))


def read_cores(sysfs: Path = _SYSFS, allowed: Collection[int] | None = None) -> Topology:
    """The cores of this machine that this process may use, or those that are named.

    Raises:
        ConfigError: sysfs does not know them.
    """
    cores = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    numa_of, socket_of = _numa_nodes(sysfs), _sockets(sysfs)
    if not set(cores) <= socket_of.keys():
        raise ConfigError(
            f"{sysfs}/devices/system/cpu does not say where core {cores[0]} is; describe the machine in a JSON file"
        )
    devices = tuple(Device(f"core{n}", socket_of[n], numa_of.get(n, 0), core=True) for n in cores)
    return Topology((Machine(platform.node() or "machine", devices),))


# ---- sysfs ----


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _sockets(sysfs: Path) -> dict[int, int]:
    found = {}
    for folder in (sysfs / "devices/system/cpu").glob("cpu[0-9]*"):
        if folder.name[3:].isdigit():
            text = _read(folder / "topology/physical_package_id")
            found[int(folder.name[3:])] = max(int(text), 0) if text.lstrip("-").isdigit() else 0
    return found


def _numa_nodes(sysfs: Path) -> dict[int, int]:
    found = {}
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        for core in _numbers(_read(folder / "cpulist")):
            found[core] = int(folder.name[4:])
    return found


def _numbers(text: str) -> Iterable[int]:
    """The numbers in a list such as 0-3,8."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _gpus(sysfs: Path) -> dict[str, Device]:
    """The GPUs by PCI address, in the order of addresses. Everything on one port of a host bridge is one switch."""
    sockets, nodes = _sockets(sysfs), _numa_nodes(sysfs)
    socket_of_node = {node: sockets.get(core, 0) for core, node in nodes.items()}
    found: dict[str, Device] = {}
    for folder in sorted((sysfs / "bus/pci/devices").glob("*")):
        if not _read(folder / "class").startswith(_DISPLAYS) or _read(folder / "vendor") not in _MAKERS:
            continue
        numa = max(int(_read(folder / "numa_node") or 0), 0)
        above = [part for part in folder.resolve().parts if part.count(":") == 2]  # PCI addresses, from the bridge on
        switch = above[0] if len(above) > 2 else None
        found[folder.name] = Device(f"gpu{len(found)}", socket_of_node.get(numa, 0), numa, switch)
    return found


# ---- NVML ----


def _nvml() -> Any | None:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _ask_nvml(nvml: Any, gpus: dict[str, Device]) -> tuple[list[str], tuple[tuple[int, int, Link], ...]]:
    """The addresses of the GPUs in NVML's order, and the links between them; sysfs's order if there is no driver."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return list(gpus), ()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        addresses = [_address(nvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
        if not addresses or not set(addresses) <= gpus.keys():
            return list(gpus), ()
        ports = [_ports(nvml, handle) for handle in handles]
        pairs = [(a, b) for a in range(len(handles)) for b in range(a + 1, len(handles))]
        links = []
        for a, b in pairs:
            direct = ports[a].count(addresses[b])
            through_switch = min(sum(p not in gpus for p in ports[a]), sum(p not in gpus for p in ports[b]))
            if direct or through_switch:
                width = (direct or through_switch) * NVLINK_BYTES_PER_S
                links.append((a, b, Link(LinkKind.NVLINK, width, _USUAL[LinkKind.NVLINK].latency_s)))
            else:
                links.append(
                    (a, b, _USUAL[_kind(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor(handles[a], handles[b]))])
                )
        return addresses, tuple(links)
    except nvml.NVMLError:
        return list(gpus), ()
    finally:
        nvml.nvmlShutdown()


def _address(bus_id: str | bytes) -> str:
    """NVML's bus id, such as 00000000:0F:00.0, as sysfs writes it."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _ports(nvml: Any, handle: Any) -> list[str]:
    """What is at the other end of each NVLink that is up."""
    found = []
    for number in range(_MOST_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, number):
                found.append(_address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, number).busId))
        except nvml.NVMLError:
            break
    return found


def _kind(nvml: Any, level: int) -> LinkKind:
    if level == nvml.NVML_TOPOLOGY_INTERNAL:
        return LinkKind.BOARD
    if level <= nvml.NVML_TOPOLOGY_MULTIPLE:
        return LinkKind.SWITCH
    return LinkKind.BRIDGE if level < nvml.NVML_TOPOLOGY_SYSTEM else LinkKind.SOCKET
