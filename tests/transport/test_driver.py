"""The CUDA driver by its own names: what it refuses is a sentence, and a graph's ends on the host are found."""

import ctypes

import pytest

from evenstep.core.errors import EvenstepError
from evenstep.transport import driver as module
from evenstep.transport.driver import Driver

KERNEL, MEMCPY, HOST = 0, 1, 3  # kinds of nodes
IN_HOST, IN_DEVICE, IN_ARRAY, UNIFIED = 1, 2, 3, 4  # kinds of memory
ON_DEVICE = range(0x1000, 0x2000)


class Library:
    """What of libcuda is called, with a graph of some nodes: a kind, and (kind, address) of a copy's two ends."""

    def __init__(self, nodes=(), fails=None):
        self.nodes, self.fails, self.freed = nodes, fails, []

    def cuMemAlloc_v2(self, address, num_bytes):
        address._obj.value = 0x1000 + num_bytes.value
        return 0 if self.fails is None else 2

    def cuMemFree_v2(self, address):
        self.freed.append(address.value)
        return 0

    def cuGetErrorString(self, code, text):
        text._obj.value = self.fails
        return 0

    def cuIpcGetMemHandle(self, handle, address):
        ctypes.memmove(ctypes.addressof(handle._obj), address.value.to_bytes(64, "little"), 64)
        return 0

    def cuIpcOpenMemHandle_v2(self, address, handle, flags):
        address._obj.value = int.from_bytes(ctypes.string_at(ctypes.byref(handle), 64), "little")
        return 0

    def cuGraphGetNodes(self, graph, nodes, count):
        count._obj.value = len(self.nodes)
        for n in range(len(self.nodes) if nodes is not None else 0):
            nodes[n] = n
        return 0

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = self.nodes[node.value][0]
        return 0

    def cuGraphMemcpyNodeGetParams(self, node, copy):
        ends = self.nodes[node.value][1:]
        for end, (kind, address) in zip((copy._obj.source, copy._obj.target), ends, strict=True):
            end.kind = kind
            end.host, end.device = (address, 0) if kind == IN_HOST else (0, address)
        return 0

    def cuPointerGetAttribute(self, kind, attribute, address):
        if address.value not in ON_DEVICE:
            return 1
        kind._obj.value = IN_DEVICE
        return 0


@pytest.fixture
def driver_of(monkeypatch):
    def make(*args, **kwargs):
        library = Library(*args, **kwargs)
        monkeypatch.setattr(module.ctypes, "CDLL", lambda name: library)
        return Driver(), library

    return make


def test_memory_is_opened_elsewhere_by_its_handle(driver_of):
    driver, library = driver_of()
    address = driver.allocate(48)
    handle = driver.handle(address)
    assert len(handle) == 64, "a zero byte does not end it"
    assert driver.open(handle) == address == 0x1030
    driver.free(address)
    assert library.freed == [address]


@pytest.mark.parametrize(("text", "said"), [(b"out of memory", "out of memory"), (b"", r"\?")])
def test_a_refusal_says_which_function_and_why(driver_of, text, said):
    driver, _ = driver_of(fails=text)
    with pytest.raises(EvenstepError, match=f"the CUDA driver refuses: cuMemAlloc_v2 says {said}"):
        driver.allocate(8)


def test_a_graph_that_stays_on_its_device_touches_nothing(driver_of):
    driver, _ = driver_of([(KERNEL,), (MEMCPY, (IN_DEVICE, 0x1000), (UNIFIED, 0x1800))])
    assert list(driver.touches_host(7)) == []


def test_the_ends_of_copies_on_the_host_and_functions_there_are_found(driver_of):
    nodes = [
        (MEMCPY, (IN_HOST, 0x70), (IN_DEVICE, 0x1000)),
        (HOST,),
        (MEMCPY, (UNIFIED, 0x1000), (UNIFIED, 0x90)),  # unified addresses say by themselves where they are
    ]
    driver, _ = driver_of(nodes)
    assert list(driver.touches_host(7)) == [0x70, None, 0x90]
