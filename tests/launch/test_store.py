from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

import processes
from evenstep.launch.store import StoreProcess


def test_bridges_meet_in_the_store_and_nothing_of_it_is_left():
    store = StoreProcess()
    try:
        first, second = (
            TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=10), wait_for_workers=False)
            for _ in range(2)
        )
        first.set("where", "here")
        assert second.get("where") == b"here"
        assert processes.is_alive(store.child.pid)
    finally:
        store.close()
    assert not processes.is_alive(store.child.pid)
