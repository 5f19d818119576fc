"""Functions and scripts as values: what can travel, and what a worker makes of them."""

import json
import os
import sys
import threading

import pytest

from evenstep.core.errors import ConfigError

pytest.importorskip("cloudpickle", reason="clusters need it: pip install 'evenstep[ray]'")
from evenstep.agents import work as module
from evenstep.agents.shipping import ship, unship
from evenstep.agents.work import ShippedWork, hold, perform
from workers import run_workers


def double(number, *, plus=0):
    return 2 * number + plus


def test_what_cannot_be_shipped_is_one_sentence():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"<lambda> cannot be shipped to the workers: cannot pickle '_thread.lock'"):
        ship(lambda: lock)
    with pytest.raises(ConfigError, match="3 cannot be called; expected a function or the path of a script"):
        ship(3)
    with pytest.raises(ConfigError, match="double cannot be called with these arguments: missing a required argument"):
        ship(double)
    with pytest.raises(ConfigError, match="what the function returned cannot be read here"):
        unship(b"no pickle")


def test_work_survives_its_way(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("pass")
    for work in (
        ShippedWork.of(double, (1,), {"plus": 3}),
        ShippedWork.of(script, (1, "x"), {}),
        ShippedWork.of(script, (), {}, str(tmp_path)),
    ):
        text, data = work.pack()
        assert ShippedWork.unpack(json.loads(json.dumps(text)), data) == work
    assert work.script == ("train.py", "pass"), "there it lies in a directory of the cluster's"


def test_worker_0_gives_back_what_a_function_returns_and_nobody_else_does():
    result = os.memfd_create("result", 0)
    try:
        hold(ShippedWork.of(double, (20,), {"plus": 2}), result)
        run_workers(1, lambda worker: perform(1))
        assert os.fstat(result).st_size == 0
        run_workers(1, lambda worker: perform(0))
        assert unship(os.pread(result, 100, 0)) == 42
        hold(ShippedWork.of(threading.Lock, (), {}), result)
        with pytest.raises(Exception, match="the function returned a lock that cannot be shipped"):
            run_workers(1, lambda worker: perform(0))
    finally:
        os.close(result)
        module._held.clear()


@pytest.mark.parametrize("here", ["the same", "another", "none"])
def test_a_script_runs_as_it_was_where_the_run_was_asked_for(tmp_path, here):
    text = "import sys, beside\nassert __name__ == '__main__'\nopen(sys.argv[1], 'w').write(__file__ + beside.WORD)\n"
    script, out = tmp_path / "train.py", tmp_path / "out"
    (tmp_path / "beside.py").write_text("WORD = ' and beside'")
    if here != "none":
        script.write_text(text if here == "the same" else "raise ValueError")
    hold(ShippedWork(None, (str(script), text), (str(out),)))
    try:
        run_workers(1, lambda worker: perform(0))
    finally:
        module._held.clear()
    assert out.read_text() == f"{script} and beside"


def test_the_error_of_a_script_that_is_not_here_shows_its_line(tmp_path):
    import traceback

    hold(ShippedWork(None, (str(tmp_path / "gone.py"), "\nraise ValueError('a bad day')\n"), ()))

    def body(worker):
        try:
            perform(0)
        except ValueError:
            return traceback.format_exc()

    try:
        (said,) = run_workers(1, body)
    finally:
        module._held.clear()
    assert "raise ValueError('a bad day')" in said
    assert "gone.py" in said
    assert sys.argv
