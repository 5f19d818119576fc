"""What is logged after the last step is shared once, as the mean over all workers, and forgotten when it counts."""

from types import SimpleNamespace

import pytest
from fakes import together

from evenstep.engine.logged import Logged
from evenstep.run.last_words import log_last


class Operations:
    """Does an operation at once, and keeps its entry; fails as often as it is told to."""

    def __init__(self, failures=0):
        self.entries, self._failures = [], failures

    def perform(self, kind, attempt, adopt):
        entry = attempt()
        assert entry.kind == kind
        if self._failures:
            self._failures -= 1
            raise LookupError("somebody died")
        self.entries.append(entry)
        return adopt(entry, True)


def engine(group, version=7, **values):
    logged = Logged()
    for name, several in values.items():
        for value in several:
            logged.add(name, value)
    return SimpleNamespace(group=group, version=version, logged=logged)


def test_everyone_has_the_mean_over_all_calls(groups_of):
    groups, operations = groups_of(2), [Operations(), Operations()]
    engines = [engine(groups[0], loss=[1.0, 2.0], rate=[0.1]), engine(groups[1], loss=[6.0], rate=[0.1])]
    together([0, 1], lambda n: log_last(engines[n], operations[n].perform))
    for here in operations:
        (entry,) = here.entries
        assert entry.value == [7, {"loss": 3.0, "rate": 0.1}]
    assert [each.logged.values for each in engines] == [{}, {}]


def test_who_has_logged_nothing_asks_nobody(groups_of):
    operations = Operations()
    log_last(engine(groups_of(1)[0]), operations.perform)
    assert operations.entries == []


def test_what_came_to_nothing_is_still_there_for_the_next_attempt(groups_of):
    here, operations = engine(groups_of(1)[0], loss=[4.0]), Operations(failures=1)
    with pytest.raises(LookupError):
        log_last(here, operations.perform)
    assert here.logged.values == {"loss": [4.0]}
    log_last(here, operations.perform)
    assert operations.entries[0].value == [7, {"loss": 4.0}]
