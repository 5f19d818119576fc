"""Lanes of tests: all are run once, side by side, and whatever happens in one is reported as if there were none."""

import re
from textwrap import dedent

import pytest

from workers import Cli

SETTINGS = """
    import pytest
    import lanes

    def pytest_collect_directory(path, parent):
        return lanes.Aside.put(path, parent) if path.name == "aside" else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(session):
        lanes.run(session, 2)
        return True
"""
FIRST = """
    import os, pathlib, time

    def meet(mine, other):
        pathlib.Path(__file__).with_name(mine).touch()
        while not pathlib.Path(__file__).with_name(other).exists():
            time.sleep(0.01)

    def test_meets(tmp_path):
        meet("one", "two")
        assert "lane-" in str(tmp_path)

    def test_dies():
        os._exit(3)

    def test_goes_on():
        pass
"""
SECOND = """
    import pytest
    from test_first import meet

    def test_meets():
        meet("two", "one")

    @pytest.mark.skip(reason="not today")
    def test_skips():
        pass

    @pytest.mark.parametrize("number", [1, 2])
    def test_is_one(number):
        print("what it said")
        assert number == 1
"""


@pytest.fixture
def outcome(tmp_path):
    """What pytest says about files, with options of its own, and its exit code."""

    def run(*options, within=".", **files):
        (tmp_path / "aside").mkdir()
        for name, text in {"conftest": SETTINGS, **files}.items():
            (tmp_path / f"{name.replace('__', '/')}.py").write_text(dedent(text))
        here = ("--rootdir", tmp_path, "-c", "/dev/null", "--basetemp", tmp_path / "base", "-p", "no:cacheprovider")
        with Cli(*here, *options, tmp_path / within, program=pytest.main) as cli:
            done = cli.wait(60.0)
        return done.stdout, done.code

    return run


def test_two_files_run_at_a_time_and_a_lane_that_ends_costs_its_test_alone(outcome):
    said, code = outcome(test_first=FIRST, test_second=SECOND)
    assert code == 1
    assert "2 failed, 4 passed, 1 skipped" in said
    assert re.search(r"test_first\.py::test_dies: lane \d ended in this test, with exit code 3", said)
    assert re.search(r"^E +assert 2 == 1$", said, re.MULTILINE)
    assert len(re.findall("^what it said$", said, re.MULTILINE)) == 1, "by the test that has failed"


def test_after_the_first_failure_the_other_lane_is_ended_too(outcome):
    failing, endless = "def test_fails(): assert False", "import time\ndef test_waits(): time.sleep(600)"
    said, code = outcome("--exitfirst", test_first=failing, test_second=endless)
    assert code == 1
    assert "stopping after 1 failures" in said
    assert "1 failed" in said


HEAVY = """
    import os, sys
    import pytest

    sys.heavy = True

    @pytest.mark.parametrize("number", range(4))
    def test_dies_once(number, rare, tmp_path):
        if number == 2:
            os._exit(4)
"""
RARE = """
    import pytest

    @pytest.fixture
    def rare():
        return 1
"""
OTHER = """
    import sys

    def test_does_not_drag_along_what_others_import():
        assert not hasattr(sys, "heavy")
"""


def test_a_folder_that_is_put_aside_is_collected_by_a_lane_of_its_own(outcome):
    others = {f"test_{number}": OTHER for number in range(8)}
    said, code = outcome(aside__conftest=RARE, aside__test_heavy=HEAVY, **others)
    assert code == 1
    assert "1 failed, 11 passed" in said
    assert re.search(r"test_heavy\.py::test_dies_once\[2\]: lane \d ended in this test, with exit code 4", said)


GROWS = """
    import sys

    def test_keeps_much():
        sys.heavy = b"x" * (100 << 20)
"""


def test_a_lane_that_has_come_to_weigh_much_is_replaced(outcome):
    said, code = outcome(test_0=GROWS, **{f"test_{number}": OTHER for number in range(1, 9)})
    assert code == 0, said
    assert " 9 passed in " in said


def test_what_cannot_be_collected_there_is_an_error_and_what_need_not_is_skipped(outcome):
    skipped = "import pytest\npytest.skip('not here', allow_module_level=True)"
    said, code = outcome(aside__test_broken="import nobody_has_this", aside__test_skipped=skipped, test_other=OTHER)
    assert code == 1
    assert "1 passed, 1 skipped, 1 error" in said
    assert "No module named 'nobody_has_this'" in said


@pytest.mark.parametrize(
    ("within", "expected"), [("test_0.py", "1 passed"), ("aside", "1 failed, 3 passed"), (".", "1 failed, 4 passed")]
)
def test_nothing_is_collected_that_was_not_asked_for(outcome, within, expected):
    said, code = outcome(within=within, aside__conftest=RARE, aside__test_heavy=HEAVY, test_0=OTHER)
    assert code == ("failed" in expected)
    assert f" {expected} in " in said
