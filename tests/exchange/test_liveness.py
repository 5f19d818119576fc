"""Whether a process is still there."""

import os

from evenstep.exchange.liveness import Liveness, spin_count


def test_a_process_that_has_ended_stays_ended_and_others_do_not():
    liveness = Liveness()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        assert not liveness.ended(pid)
        assert not liveness.ended(os.getpid())
        os.close(writing)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert liveness.ended(pid)
    finally:
        os.waitpid(pid, 0)
        os.close(reading)
    assert liveness.ended(pid), "its number may mean another process by now"
    liveness.close()
    assert liveness.ended(pid), "it was not there when it was looked for"


def test_spinning_pays_only_while_each_process_has_a_core():
    cores = len(os.sched_getaffinity(0))
    assert spin_count(cores) > spin_count(cores + 1) > 0
