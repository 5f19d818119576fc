"""What a forked worker does with a script, and what it tells of its end."""

import gc
import json
import os

import pytest

from evenstep.core import env
from evenstep.core.children import Children
from evenstep.core.errors import MismatchError, PeerError
from evenstep.launch import worker
from evenstep.launch.worker import run_worker
from workers import run_workers


@pytest.fixture
def life(script):
    """Runs a script in a worker; returns its exit code, its output and what it told the supervisor."""

    def live(text, *args):
        path, lines, codes = script(text), [], []

        def main(pipes):
            return run_worker(path, args, env.worker_variables(1, 2, None, 0, pipes["events"]))

        def heard(child, kind, found):
            lines.extend((kind, line) for line in found)

        with Children(heard, lambda child: codes.append(child.code)) as children:
            children.start(main, ("out", "err", "events"))
            while not codes:
                children.turn(5.0)
        out = [line.decode() for kind, line in lines if kind == "out"]
        return codes[0], out, [json.loads(line) for kind, line in lines if kind == "events"]

    return live


def test_a_script_finds_its_arguments_and_its_place_and_says_that_it_has_ended(life):
    code, out, events = life("import os, sys; print(sys.argv[1:], os.environ['EVENSTEP_WORKER'])", "-x", "y z")
    assert (code, out, events) == (0, ["['-x', 'y z'] 1"], [{"ended": True}])


@pytest.mark.parametrize(
    ("ends", "code", "events"),
    [
        ("sys.exit(5)", 5, []),
        ("sys.exit()", 0, []),
        ("sys.exit('no data')", 1, [{"error": "no data"}]),
        ("raise ConfigError('too many')", 2, [{"error": "evenstep: too many", "mistake": True}]),
        ("raise PeerError('of another', 0)", PeerError.exit_code, []),
        ("raise PeerError('mine', 1)", PeerError.exit_code, [{"error": "evenstep: mine"}]),
        ("os._exit(300)", 300 & 0xFF, []),
    ],
)
def test_however_a_script_ends_is_an_exit_code_and_a_word(life, ends, code, events):
    head = "import os, sys\nfrom evenstep.core.errors import *\n"
    assert life(head + ends) == (code, [], events)


def test_an_error_is_told_from_the_users_script_on(life):
    code, _, events = life("def f():\n    raise ValueError('a bad day')\nf()")
    text = events[0]["error"]
    assert (code, events[0]["hopeless"]) == (1, False)
    assert text.rstrip().endswith("ValueError: a bad day")
    assert "runpy" not in text
    assert os.path.basename(run_worker.__code__.co_filename) not in text


def test_an_error_that_would_come_again_is_called_so(life):
    code, _, events = life("from evenstep.core.errors import *\nraise MismatchError('two')")
    assert (code, events[0]["hopeless"]) == (MismatchError.exit_code, True)


def test_a_copy_of_the_worker_tells_whoever_reads_its_output(life):
    code, _, events = life(
        """
        import os
        pid = os.fork()
        if pid == 0:
            raise ValueError("of the copy")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        """
    )
    assert (code, events) == (0, [{"ended": True}])


def test_threads_and_exit_handlers_have_their_time(life):
    _, out, _ = life(
        """
        import atexit, threading, time
        atexit.register(lambda: print("handler"))
        threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
        """
    )
    assert out == ["thread", "handler"]


def test_what_workers_need_not_look_at_is_looked_at_again_in_the_end(monkeypatch):
    """Otherwise libraries whose objects outlive the interpreter report leaks at the end of every run."""

    def body(_):
        at_exit = []
        monkeypatch.setattr(worker.atexit, "register", at_exit.append)
        gc.unfreeze()
        worker.warm_up()
        frozen = gc.get_freeze_count()
        for function in at_exit:
            function()
        return frozen, gc.get_freeze_count()

    [(before, after)] = run_workers(1, body)  # this process keeps what it has put aside
    assert before > 0
    assert after == 0
