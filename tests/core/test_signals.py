"""Signals as something to wait for."""

import os
import select
import signal

from evenstep.core.signals import Signals


def test_signals_are_handed_on_in_order_and_handlers_come_back():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    caught = []
    try:
        with Signals(caught.append, signal.SIGUSR1, signal.SIGUSR2) as signals:
            assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
            assert not select.select([signals], [], [], 0)[0]
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert select.select([signals], [], [], 5)[0]
            signals.deliver()
            signals.deliver()  # there is no more
        assert caught == [signal.SIGUSR2, signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGUSR1, before)
