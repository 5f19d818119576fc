"""Threads that run participants: what is left of them when they are closed."""

import os
import threading

from evenstep.exchange.threads import Threads


def test_closed_threads_are_gone_from_the_system_too():
    """A process forked while one is still cleaning up would inherit its locks, and wait for them for ever."""
    for _ in range(50):
        threads = Threads("test")
        numbers: list[int] = []
        done = threading.Barrier(5)

        def note(numbers=numbers, done=done):
            numbers.append(threading.get_native_id())
            done.wait(timeout=10)

        for number in range(4):
            threads.submit(number, note)
        done.wait(timeout=10)
        threads.close()
        assert not {str(number) for number in numbers} & set(os.listdir("/proc/self/task"))
