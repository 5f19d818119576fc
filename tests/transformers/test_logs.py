"""What parts log is kept, part by part and thread by thread, and becomes one mean for the batch."""

import threading

import pytest
import torch

from evenstep.core.errors import UnsupportedError
from evenstep.transformers.logs import PartLogs, merged


def test_what_is_logged_inside_a_part_is_kept_and_outside_is_not():
    logs = PartLogs()
    assert not logs.keep({"a": 1.0})
    with logs.part() as kept:
        assert logs.keep({"a": torch.tensor(2.0), "b": 3})
        assert logs.keep({"c": 4.0})
    assert kept == [{"a": 2.0, "b": 3.0}, {"c": 4.0}]
    assert not logs.keep({"a": 1.0})


def test_a_part_in_another_thread_keeps_its_own():
    logs = PartLogs()
    found = []
    with logs.part() as kept:
        thread = threading.Thread(target=lambda: found.append(logs.keep({"a": 1.0})))
        thread.start()
        thread.join()
    assert found == [False]
    assert kept == []


def test_what_is_not_a_number_is_refused_by_name():
    logs = PartLogs()
    with logs.part(), pytest.raises(UnsupportedError, match="compute_loss logs 'rows', which is a Tensor"):
        logs.keep({"rows": torch.zeros(2)})


def test_the_mean_is_weighted_as_losses_are():
    parts = [[{"a": 1.0}, {"b": 5.0}], [{"a": 4.0}, {"b": 7.0}], [{"a": float("nan")}, {"b": 9.0}]]
    assert merged(parts, [2.0, 1.0, 0.0]) == [{"a": 2.0}, {"b": pytest.approx(17 / 3)}]
    assert merged([[{"a": 0.1}]], [3.0]) == [{"a": 0.1}], "one part is logged as it is"


def test_parts_that_log_different_things_are_refused():
    with pytest.raises(UnsupportedError, match=r"logs \[\['b'\]\] for one part of a batch and \[\['a'\]\] for another"):
        merged([[{"a": 1.0}], [{"b": 1.0}]], [1.0, 1.0])
