"""When a piece is computed, captured or replayed, and what is said; against a recorder that captures nothing."""

import pytest
import torch

from evenstep.core.errors import NondeterminismError, UnsupportedError
from evenstep.engine.graphs import Graphs, Products, Task

TEXT = "operation not permitted when stream is capturing\nmore of it"


class Piece:
    """Doubles its input; counts how often it is computed."""

    def __init__(self, script, inputs, seeds):
        self._script, self._inputs, self._seeds = script, inputs, seeds
        self.drew, self.carried = script.draws, script.carries

    def forward(self):
        self._script.log.append("computed")
        value = 2 * self._inputs[0] + self._script.hidden + self._seeds[0]
        self.products = Products(value.double().sum()[None], [], [])
        if self._script.counts:
            self._script.seen += 1

    def backward(self):
        self.products.gradients = [[self._inputs[0] * self._script.hidden]]


class Script:
    """What user code would do, and what of it can be seen."""

    def __init__(self):
        self.log, self.hidden, self.seen = [], 1.0, 0
        self.draws = self.carries = self.counts = False
        self.sent = []

    def task(self, value=1.0, signature="s", seed=0, *, is_one_of_many=False):
        return Task(
            signature,
            [torch.full((2,), value)],
            [seed],
            lambda anew: {"beta": self.seen},
            lambda inputs, seeds, generators: Piece(self, inputs, seeds),
            lambda numbers: self.sent.append(numbers.item()),
            is_one_of_many=is_one_of_many,
        )


class Recording:
    def __init__(self, script, task, hidden):
        self._script, self._task, self._hidden = script, task, hidden
        self.num_bytes, self.num_copies = 0, task.is_one_of_many + 1

    def replay(self, inputs, seeds, between):
        self._script.log.append("replayed")
        value = 2 * inputs[0] + self._hidden + seeds[0]
        products = Products(value.double().sum()[None], [], [[inputs[0] * self._hidden]])
        between(products.numbers)
        return products


class Recorder:
    def __init__(self, script, error=None, wrong=0.0, room=True):
        self._script, self._error, self._wrong, self._room = script, error, wrong, room

    def record(self, task):
        if self._error is not None:
            raise self._error
        self._script.log.append("captured")
        return Recording(self._script, task, self._script.hidden + self._wrong)

    def has_room(self, num_bytes):
        return self._room

    def release(self):
        self._script.log.append("released")


def make(mode="auto", **options):
    script, said = Script(), []
    return script, Graphs(mode, Recorder(script, **options), said.append), said


def test_a_piece_is_computed_twice_then_captured_and_replayed_on_its_own_inputs():
    script, graphs, said = make(room=False)
    results = [graphs.run(script.task(float(n), seed=n)).numbers.item() for n in range(5)]
    assert results == [2 * (2 * n + 1 + n) for n in range(5)]
    assert script.log == ["computed", "computed", "captured", "replayed", "replayed", "replayed"]
    assert script.sent == results
    assert not said


def test_replays_are_checked_by_computing_too_less_and_less_often():
    script, graphs, _ = make()
    for n in range(70):
        graphs.run(script.task(float(n)))
    assert script.log.count("replayed") == 68
    assert script.log.count("computed") == 2 + 3, "the first, the eighth and the sixty-fourth replay"
    assert script.log.count("released") == 3


def test_every_copy_of_a_graph_is_checked_at_once():
    script, graphs, _ = make()
    for n in range(12):
        graphs.run(script.task(float(n), is_one_of_many=True))
    assert script.log.count("computed") == 2 + 3, "the first, the second and the eighth replay"


def test_other_signatures_are_captured_by_themselves():
    script, graphs, _ = make(room=False)
    for _ in range(4):
        graphs.run(script.task(signature="long"))
        graphs.run(script.task(signature="short"))
    assert script.log.count("captured") == 2
    assert script.log.count("computed") == 4


def test_what_user_code_sees_decides():
    script, graphs, _ = make(room=False)
    for _ in range(3):
        graphs.run(script.task())
    script.seen, script.hidden = 5, 7.0  # a schedule has changed a value
    assert graphs.run(script.task()).numbers.item() == 2 * (2 + 7)
    for _ in range(2):
        graphs.run(script.task())
    script.seen, script.hidden = 0, 1.0
    assert graphs.run(script.task()).numbers.item() == 2 * (2 + 1)
    assert script.log.count("captured") == 2
    assert script.log[-1] == "replayed"


def test_a_value_that_is_another_one_every_time_ends_it_with_its_name():
    script, graphs, said = make(room=False)
    for n in range(60):
        script.seen = n // 3
        graphs.run(script.task())
    assert len(said) == 1
    assert "beta is" in said[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"draws": True}, "draws random numbers on the host"),
        ({"carries": True}, "uses a run.carry"),
        ({"counts": True}, "changes what it can see: beta is 0"),
    ],
)
def test_what_a_replay_would_leave_out_is_not_captured(change, reason):
    script, graphs, said = make()
    vars(script).update(change)
    for _ in range(5):
        graphs.run(script.task())
    assert script.log == ["computed"] * 5
    assert len(said) == 1
    assert reason in said[0]


def test_what_cannot_be_captured_is_computed_and_said_once_with_the_line():
    def user_code():
        raise RuntimeError(TEXT)

    try:
        user_code()
    except RuntimeError as caught:
        error = caught
    script, graphs, said = make(error=error)
    for _ in range(6):
        graphs.run(script.task())
    assert script.log == ["computed"] * 6
    assert len(said) == 1
    assert "RuntimeError: operation not permitted when stream is capturing (at " in said[0]
    assert "test_graphs.py" in said[0]
    assert "more of it" not in said[0]


def test_if_it_must_be_captured_what_cannot_is_an_error():
    script, graphs, _ = make(True, error=RuntimeError("no"))
    for _ in range(2):
        graphs.run(script.task())
    with pytest.raises(UnsupportedError, match="cannot be captured as a CUDA graph: RuntimeError: no"):
        graphs.run(script.task())


def test_nothing_is_captured_if_nothing_shall_be():
    script, graphs, _ = make(False)
    for _ in range(5):
        graphs.run(script.task())
    assert script.log == ["computed"] * 5


def test_a_graph_that_is_wrong_from_the_first_is_not_used():
    script, graphs, said = make(wrong=1.0)
    results = {graphs.run(script.task()).numbers.item() for _ in range(6)}
    assert results == {2 * (2 + 1)}
    assert "other bits" in said[0]


def test_something_hidden_that_changes_later_is_an_error_not_a_wrong_result():
    script, graphs, _ = make()
    for _ in range(5):
        graphs.run(script.task())
    script.hidden = 3.0
    for _ in range(4):
        graphs.run(script.task())
    with pytest.raises(NondeterminismError, match="after 8 replays"):
        graphs.run(script.task())


def test_many_shapes_end_it():
    script, graphs, said = make(room=False)
    for n in range(20):
        for _ in range(3):
            graphs.run(script.task(signature=n))
    assert len(said) == 1
    assert "more than 16 shapes" in said[0]
