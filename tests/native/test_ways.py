"""Choosing between two ways by what they cost, with costs that the test makes up."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import evenstep.native

WAYS = Path(evenstep.native.__file__).with_name("ways.c")


class Ways(ctypes.Structure):
    _fields_ = [
        ("count", ctypes.c_uint64),
        ("cost_ns", ctypes.c_int64 * 2),
        ("faster", ctypes.c_int),
        ("clearly", ctypes.c_int),
    ]


@pytest.fixture(scope="module")
def ways_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("ways") / "ways.so"
    subprocess.run(["gcc", "-std=c11", "-shared", "-fPIC", WAYS, "-o", path], check=True)
    return ctypes.CDLL(str(path))


def choices(library: ctypes.CDLL, ways: Ways, count: int, cost_ns: Callable[[int, int], int]) -> list[int]:
    """Which way is taken so many times, where `cost_ns(time, way)` says what it takes then."""
    found = []
    for time in range(count):
        way = library.es_ways_next(ctypes.byref(ways))
        taken_ns = cost_ns(time, way) if library.es_ways_looks(ctypes.byref(ways)) else -1
        library.es_ways_learn(ctypes.byref(ways), way, ctypes.c_int64(taken_ns))
        library.es_ways_settle(ctypes.byref(ways), library.es_ways_verdict(ctypes.byref(ways)))
        found.append(way)
    return found


@pytest.mark.parametrize("faster", [0, 1])
def test_the_faster_way_is_taken_and_the_other_one_now_and_then(ways_library, faster):
    found = choices(ways_library, Ways(), 160, lambda _, way: 100 if way == faster else 150)
    assert found[:6] == [0, 1] * 3
    assert found[6:].count(1 - faster) == 9


def test_a_way_that_is_clearly_slower_is_seldom_taken(ways_library):
    ways = Ways()
    assert choices(ways_library, ways, 1024, lambda _, way: (100, 400)[way])[6:].count(1) == 3
    after = choices(ways_library, ways, 128, lambda _, way: (600, 400)[way])
    assert after[-48:].count(1) == 45, "what no longer is clear is looked at more often"


def test_the_other_way_is_found_when_it_has_become_the_faster_one(ways_library):
    ways = Ways()
    choices(ways_library, ways, 96, lambda _, way: (80, 100)[way])
    after = choices(ways_library, ways, 96, lambda _, way: (150, 100)[way])
    assert after[-48:].count(1) == 45
    again = choices(ways_library, ways, 96, lambda _, way: (80, 100)[way])
    assert again[-48:].count(0) == 45


def test_a_single_time_that_was_held_up_changes_nothing(ways_library):
    ways = Ways()
    choices(ways_library, ways, 96, lambda _, way: (80, 100)[way])
    after = choices(ways_library, ways, 96, lambda time, way: 10**9 if time == 4 else (80, 100)[way])
    assert after.count(1) == 6


def test_few_are_timed(ways_library):
    ways, looked = Ways(), []
    for _ in range(64):
        looked.append(ways_library.es_ways_looks(ctypes.byref(ways)))
        ways_library.es_ways_learn(ctypes.byref(ways), 0, ctypes.c_int64(1))
    assert sum(looked[6:]) == 14
