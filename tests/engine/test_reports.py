"""Workers tell each other of a step to the bit, and everyone sees who does another one."""

import json
import math

import pytest

from evenstep.core.errors import MismatchError, NondeterminismError
from evenstep.engine.reports import UNSTEADY, Report, compare, compare_contents
from evenstep.engine.results import Mean, ShardResult


def report(worker=0, contents=None, **facts):
    results = {2 * worker: ShardResult(Mean(0.1, 3), False, {"hit": Mean(math.inf, 0.0)})}
    return Report(worker, {"batch": [4, 4], "options": [{"lr": 0.1}], **facts}, contents or {}, results, 0.25)


def test_a_report_survives_its_way_over_the_wire():
    sent = report(1, {"[0]": "float32 (4, 3) 17"})
    assert Report.unpack(json.loads(json.dumps(sent.pack()))) == sent


def test_the_same_step_on_all_workers_is_fine():
    compare(7, [report(worker) for worker in range(3)])


def test_who_does_another_step_is_named_with_what_differs():
    with pytest.raises(MismatchError, match=r"in step 7 worker 2 has batch \[3, 4\] but worker 0 has \[4, 4\]"):
        compare(7, [report(0), report(1), report(2, batch=[3, 4])])


def test_who_comes_with_another_batch_is_named_with_the_tensor():
    reports = [report(0, {"[1]": "int64 (8,) 5"}), report(1, {"[1]": "int64 (8,) 6"})]
    with pytest.raises(MismatchError, match=r"worker 1 came with another batch than worker 0: \[1\] is int64 \(8,\) 6"):
        compare(7, reports)


@pytest.mark.parametrize("contents", [{}, {"a": "1", "b": "2"}])
def test_a_batch_of_another_structure_is_another_batch(contents):
    with pytest.raises(MismatchError, match="nothing"):
        compare_contents(1, [(0, {"a": "1"}), (3, contents)])


def test_a_worker_that_was_replaced_is_compared_with_its_earlier_life():
    with pytest.raises(MismatchError, match="worker 0 came with another batch than worker 0"):
        compare_contents(1, [(0, {"a": "1"}), (0, {"a": "2"})])


def test_who_has_other_samples_is_named_with_the_remedy_and_may_only_be_warned():
    both = [(0, {"sample 3[1]": "int64 () 5"}), (2, {"sample 3[1]": "int64 () 6"})]
    with pytest.raises(
        NondeterminismError, match=r"workers 0 and 2 have different data: sample 3\[1\] is int64 \(\) 5"
    ):
        compare_contents(1, both)
    with pytest.warns(UserWarning, match="sort what a directory or a set gives"):
        compare_contents(1, both, strict=False)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sample_that_is_another_one_when_drawn_again_is_refused_even_where_all_have_it(workers):
    found = [(worker, {"sample 3[0]": "int64 () 5", "sample 3[1]": UNSTEADY}) for worker in range(workers)]
    with pytest.raises(NondeterminismError, match=r"sample 3\[1\] is another one when it is drawn again.*of your own"):
        compare_contents(1, found)
    with pytest.warns(UserWarning, match="drawn again"):
        compare_contents(1, found, strict=False)
