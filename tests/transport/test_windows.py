"""Windows: what one worker writes the others read; and memory of GPUs is given back however it ends."""

import os

import pytest
import torch

from evenstep.core.errors import EvenstepError
from evenstep.transport import windows
from evenstep.transport.segment import Segment
from evenstep.transport.windows import HostWindows, PeerWindows

CPU = torch.device("cpu")


def octets(*values):
    return torch.tensor(values, dtype=torch.uint8)


def test_what_one_worker_writes_the_others_read(new_segment):
    segment = new_segment(2)
    other = Segment(os.dup(segment.fd))  # as in another process
    mine, theirs = (HostWindows(s.memory, CPU, rank, [2, 1], 100) for rank, s in enumerate((segment, other)))
    mine.write(1, 40, octets(1, 2, 3))
    theirs.write(0, 97, octets(7, 8, 9))
    mine.flush()
    theirs.flush()
    assert theirs.read(0, 1, 40, 3).tolist() == [1, 2, 3]
    assert mine.read(1, 0, 97, 3).tolist() == [7, 8, 9]
    assert mine.read(0, 0, 97, 3).tolist() == [0, 0, 0], "slots do not share memory"
    mine.close()
    other.close()


class Driver:
    """A driver that knows which memory is allocated and open, and may refuse to open more."""

    def __init__(self, refuses=None):
        self.allocated, self.opened, self._refuses = [], [], refuses

    def allocate(self, num_bytes):
        self.allocated.append(4096)
        return 4096

    def free(self, address):
        self.allocated.remove(address)

    def handle(self, address):
        return b"mine"

    def open(self, handle):
        if handle == self._refuses:
            raise EvenstepError("the CUDA driver refuses")
        self.opened.append(handle)
        return 8192 + len(self.opened)

    def close(self, address):
        self.opened.pop(address - 8193)


@pytest.mark.parametrize("refuses", [b"a", b"b", None])
def test_a_gpu_that_cannot_be_opened_leaves_nothing_open(monkeypatch, refuses):
    driver = Driver(refuses)
    monkeypatch.setattr(windows, "Driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(windows, "DeviceBytes", None)  # nor does it if torch cannot take the memory over
    handles = [b"a".hex(), b"mine".hex(), b"b".hex()]
    with pytest.raises(TypeError if refuses is None else EvenstepError):
        PeerWindows(CPU, 1, [1, 1, 1], 64, lambda mine: handles)
    assert driver.allocated == driver.opened == []
