"""The running machine, from a sysfs that a test has made up and an NVML that it plays."""

import os
from pathlib import Path

import pytest

from evenstep.core.errors import ConfigError
from evenstep.plan.topology import Topology
from evenstep.topology import machine, read_cores, read_machine


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two sockets of two cores; two GPUs behind one switch of the first, one on a port of the second."""
    for core in range(4):
        folder = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core // 2}\n")
    (tmp_path / "devices/system/cpu/cpufreq").mkdir()
    for node, cores in enumerate(("0-1", "2,3")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    for way, numa in (
        ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0", 0),
        ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0", 0),
        ("pci0000:80/0000:80:01.0/0000:81:00.0", 1),
    ):
        gpu(tmp_path, way, "0x030200", numa)
    gpu(tmp_path, "pci0000:00/0000:00:02.0", "0x020000", 0)  # a network card
    return tmp_path


def gpu(sysfs: Path, way: str, kind: str, numa: int) -> None:
    folder = sysfs / "devices" / way
    folder.mkdir(parents=True)
    for name, text in (("class", kind), ("vendor", "0x10de"), ("numa_node", str(numa))):
        (folder / name).write_text(text + "\n")
    (sysfs / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (sysfs / "bus/pci/devices" / folder.name).symlink_to(folder)


class Nvml:
    """Three GPUs; what the driver says of them is in the two tables."""

    class NVMLError(Exception):
        pass

    NVML_TOPOLOGY_INTERNAL, NVML_TOPOLOGY_MULTIPLE, NVML_TOPOLOGY_SYSTEM = 0, 20, 50
    order = ("00000000:81:00.0", b"00000000:03:00.0", "00000000:04:00.0")

    def __init__(self, links: dict[int, list[str]], ancestors: dict[frozenset[int], int], *, driver: bool = True):
        self._links, self._ancestors, self._driver, self.open = links, ancestors, driver, 0

    def nvmlInit(self):
        if not self._driver:
            raise self.NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.order)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetPciInfo(self, handle):
        return type("Pci", (), {"busId": self.order[handle]})

    def nvmlDeviceGetNvLinkState(self, handle, number):
        if number >= len(self._links.get(handle, [])):
            raise self.NVMLError("not supported")
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, number):
        return type("Pci", (), {"busId": self._links[handle][number]})

    def nvmlDeviceGetTopologyCommonAncestor(self, a, b):
        return self._ancestors[frozenset((a, b))]


def kinds(topology: Topology) -> dict[str, str]:
    names, count = topology.names, topology.num_devices
    return {f"{names[a]} {names[b]}": str(topology.link(a, b).kind) for a in range(count) for b in range(a + 1, count)}


def test_sysfs_alone_says_switches_bridges_and_sockets(sysfs, monkeypatch):
    monkeypatch.setattr(machine, "_nvml", lambda: None)
    topology = read_machine(sysfs)
    assert kinds(topology) == {"gpu0 gpu1": "switch", "gpu0 gpu2": "socket", "gpu1 gpu2": "socket"}
    assert [(d.socket, d.numa) for d in topology.machines[0].devices] == [(0, 0), (0, 0), (1, 1)]


def test_nvml_gives_the_order_the_boards_and_direct_nvlinks(sysfs, monkeypatch):
    ancestors = {frozenset((0, 1)): 50, frozenset((0, 2)): 40, frozenset((1, 2)): 0}
    nvml = Nvml({0: ["00000000:03:00.0"] * 2, 1: ["00000000:81:00.0"] * 2}, ancestors)
    monkeypatch.setattr(machine, "_nvml", lambda: nvml)
    topology = read_machine(sysfs)
    assert kinds(topology) == {"gpu2 gpu0": "nvlink", "gpu2 gpu1": "bridge", "gpu0 gpu1": "board"}
    assert topology.link(0, 1).bandwidth_bytes_per_s == 50e9
    assert nvml.open == 0


def test_nvlinks_into_a_switch_join_all_who_have_them(sysfs, monkeypatch):
    switch = "00000000:AA:00.0"
    nvml = Nvml({0: [switch] * 18, 1: [switch] * 18, 2: [switch] * 12}, {})
    monkeypatch.setattr(machine, "_nvml", lambda: nvml)
    topology = read_machine(sysfs)
    assert set(kinds(topology).values()) == {"nvlink"}
    assert [topology.link(0, b).bandwidth_bytes_per_s for b in (1, 2)] == [450e9, 300e9]


def test_without_a_driver_sysfs_has_the_word(sysfs, monkeypatch):
    monkeypatch.setattr(machine, "_nvml", lambda: Nvml({}, {}, driver=False))
    assert read_machine(sysfs).names == ("gpu0", "gpu1", "gpu2")


def test_a_machine_without_gpus_is_its_cores(sysfs, monkeypatch):
    for link in (sysfs / "bus/pci/devices").iterdir():
        link.unlink()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3})
    assert kinds(read_machine(sysfs)) == {"core1 core2": "socket", "core1 core3": "socket", "core2 core3": "memory"}


def test_cores_that_sysfs_does_not_know_are_refused(sysfs):
    with pytest.raises(ConfigError, match="does not say where core 9 is; describe the machine in a JSON file"):
        read_cores(sysfs, [9])


def test_this_machine_can_be_read():
    assert read_cores().num_devices == len(os.sched_getaffinity(0))
