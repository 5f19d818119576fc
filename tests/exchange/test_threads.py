"""Threads that run participants: how their caller is interrupted, and what is left of them when they are closed."""

import _thread
import contextlib
import os
import threading

import pytest
import torch
from torch.utils import checkpoint

from evenstep.exchange.rendezvous import Rendezvous
from evenstep.exchange.threads import Threads, side_by_side


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


def checkpointed(function, x):
    """As `torch.utils.checkpoint.checkpoint` was up to torch 2.12: an error leaves its generator where it is."""
    arguments = (True, checkpoint.noop_context_fn, "default", False, True)
    generator = checkpoint._checkpoint_without_reentrant_generator(function, *arguments, x)
    next(generator)
    return function(x), generator


def test_an_error_inside_a_checkpoint_leaves_no_hooks_in_the_thread():
    threads, rendezvous = Threads("test"), Rendezvous(noun="participant")

    def fail(x):
        raise ValueError("inside the checkpoint")

    def hooks(_=None):
        return torch._C._autograd._top_saved_tensors_default_hooks(False)

    def body(task):
        return side_by_side(threads, rendezvous.register(range(1)), task, lambda _, error: error)

    with contextlib.closing(threads):
        with pytest.raises(ValueError, match="inside the checkpoint") as kept:
            body(lambda _: checkpointed(fail, torch.ones(1)))
        assert body(hooks) == [None]
        assert kept.value.__traceback__ is not None  # whoever keeps the error keeps its frames


def test_a_signal_that_comes_just_before_the_caller_waits_is_heard():
    """Python notes it, but nothing wakes the caller, who was about to sleep: as if it had been noted and not sent."""
    threads, freed, heard = Threads("test"), threading.Event(), []

    def body(me):
        _thread.interrupt_main()
        heard.append(freed.wait(20.0))

    with pytest.raises(KeyboardInterrupt):
        side_by_side(threads, Rendezvous().register([0]), body, lambda me, error: error)
    freed.set()
    threads.close()
    assert heard == [True]
