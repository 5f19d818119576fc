"""The test kit itself: it must see leaks, and carry back whatever happens in a worker."""

import ctypes
import gc
import mmap
import os
import signal
import subprocess
import threading

import pytest
import torch

import evenstep
import pages
import processes
from leaks import nothing_left_behind
from workers import WorkersFailed, inherited_segment, run_outcomes, run_workers


def leaks(action) -> str:
    with pytest.raises(pytest.fail.Exception) as caught, nothing_left_behind(leaving_s=0.05):
        action()
    return str(caught.value)


def test_a_leaked_thread_process_memory_or_variable_is_seen():
    event = threading.Event()
    thread = threading.Thread(target=event.wait, name="forgotten")
    assert "thread forgotten" in leaks(thread.start)
    event.set()
    thread.join()
    started = []
    assert "sleep 600" in leaks(lambda: started.append(subprocess.Popen(["sleep", "600"])))
    started[0].wait()
    assert "sleep 601" in leaks(lambda: subprocess.run("sleep 601 &", shell=True, check=True))  # its parent has ended
    fds = []
    assert "memfd:forgotten" in leaks(lambda: fds.append(os.memfd_create("forgotten")))
    os.close(fds[0])
    assert "EVENSTEP_FORGOTTEN: None became '1'" in leaks(lambda: os.environ.update(EVENSTEP_FORGOTTEN="1"))
    assert "EVENSTEP_FORGOTTEN" not in os.environ


def test_changed_settings_are_seen_and_put_back():
    assert "get_num_threads(): 1 became 2" in leaks(lambda: torch.set_num_threads(2))
    assert "enabled(): False became True" in leaks(lambda: torch.use_deterministic_algorithms(True))
    assert torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()


def test_workers_return_their_results_in_order_and_find_their_place():
    def body(worker):
        with evenstep.Run(quiet=True) as run:
            return worker, run.worker, run.num_workers, run.shards, torch.arange(worker)

    found = run_workers(3, body, shards=5)
    assert [f[:4] for f in found] == [(w, w, 3, 5) for w in range(3)]
    assert [len(f[4]) for f in found] == [0, 1, 2]


def test_an_end_of_any_kind_is_carried_back():
    def body(worker):
        if worker == 0:
            raise evenstep.ConfigError("not like this")
        if worker == 1:
            raise SystemExit(3)
        if worker == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if worker == 3:
            return lambda: "a function cannot be pickled"
        return inherited_segment().num_workers

    outcomes = run_outcomes(5, body)
    kinds = [(outcome.kind, outcome.exit_code) for outcome in outcomes]
    assert kinds[:3] == [("ConfigError", 2), ("SystemExit", 3), ("Killed", -signal.SIGKILL)]
    assert "the result cannot be sent" in outcomes[3].text
    assert outcomes[4].value == 5
    assert "evenstep.core.errors.ConfigError: not like this" in outcomes[0].text
    with pytest.raises(WorkersFailed, match=r"worker 0 \(ConfigError, exit code 2\)"):
        run_workers(2, body)


def test_workers_that_hang_are_ended_with_their_children():
    def body(worker):
        subprocess.Popen(["sleep", "602"])
        threading.Event().wait()

    with pytest.raises(TimeoutError, match=r"workers \[0, 1\] did not end in time"):
        run_workers(2, body, timeout_s=0.3)
    assert processes.until(lambda: "sleep 602" not in processes.descendants().values())


def test_memory_that_is_moved_into_huge_pages_is_what_it_was():
    text = bytes(range(256)) * (24 << 10)
    with mmap.mmap(-1, len(text), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(text)
        view = ctypes.c_char.from_buffer(memory)
        begin = ctypes.addressof(view)
        assert sum(begin <= place < begin + len(text) for place in pages.places()) in (2, 3)
        pages.collapse()
        assert memory[:] == text
        del view


def test_what_is_settled_is_gone_through_by_no_collection():
    kept = [[] for _ in range(10)]
    assert any(each is kept for each in gc.get_objects())
    pages.settle()
    assert not any(each is kept for each in gc.get_objects())
