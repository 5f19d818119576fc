"""The in-process synchroniser. Every test that could hang fails instead: all joins are bounded."""

import copy
import pickle
import random
import sys
import threading
import time

import pytest

import processes
from evenstep.core.errors import EvenstepError, MismatchError, SilenceError
from evenstep.exchange.rendezvous import ParticipantError, Rendezvous


def total(offers):
    return [sum(offers)] * len(offers)


def run(session, *bodies, join_s=60.0):
    """Run one body for each participant; return what each returned or raised. Fails where one hangs."""
    found = [None] * len(bodies)

    def thread(index, body):
        participant = session.participants[index]
        try:
            with participant:
                found[index] = body(participant)
        except BaseException as error:  # noqa: BLE001  # the thread's border: the test looks at it
            found[index] = error

    threads = [threading.Thread(target=thread, args=item, daemon=True) for item in enumerate(bodies)]
    for t in threads:
        t.start()
    deadline = time.monotonic() + join_s
    for t in threads:
        t.join(max(deadline - time.monotonic(), 0.01))
    assert not any(t.is_alive() for t in threads), "a participant hangs"
    return found


@pytest.fixture(params=[False, True], ids=["parallel", "turns"])
def rendezvous(request):
    return Rendezvous(timeout_s=30.0, turns=request.param)


class Clock:
    """The time of all sessions: it stands still until a test lets it pass."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def passes(self, seconds, session):
        """Let time pass, and everyone who waits look at the clock."""
        self.now += seconds
        for participant in session.participants:
            if participant._wake.locked():
                participant._wake.release()
        time.sleep(0.02)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("evenstep.exchange.rendezvous.time", clock)
    return clock


def until_it_waits(participant):
    assert processes.until(lambda: participant._offer is not None)


def meet_once(value):
    return lambda p: p.meet("round", value, total)


def test_everyone_gets_the_answer_that_the_first_gave(rendezvous):
    led_by = []

    def lead(offers):
        led_by.append(threading.current_thread())
        assert offers == ["a", "b", "c"]
        return [o * 2 for o in offers]

    session = rendezvous.register(["x", "y", "z"])
    assert session.num_participants == 3
    assert run(session, *[lambda p, v=v: p.meet("round", v, lead) for v in "abc"]) == ["aa", "bb", "cc"]
    assert len(led_by) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_offers_are_in_registration_order_whoever_comes_first(order):
    session = Rendezvous(timeout_s=30.0).register(["late", "b", "a"])

    def body(place):
        def meet(p):
            time.sleep(0.02 * order[place])
            return p.meet("round", place, lambda offers: [offers] * 3)

        return meet

    assert run(session, body(0), body(1), body(2)) == [[0, 1, 2]] * 3


def test_many_rounds_on_one_registration(rendezvous):
    def body(value):
        return lambda p: [p.meet(f"round {n}", value + n, total) for n in range(50)]

    expected = [sum(v + n for v in range(4)) for n in range(50)]
    assert run(rendezvous.register(range(4)), *map(body, range(4))) == [expected] * 4


def test_rounds_do_not_mix_when_participants_are_slow_at_random():
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for seed in range(20):
            rng = random.Random(seed)
            naps = [[rng.random() * 2e-4 for _ in range(40)] for _ in range(3)]

            def body(place, naps=naps):
                def meet(p):
                    found = []
                    for n, nap in enumerate(naps[place]):
                        if nap > 1e-4:
                            time.sleep(nap)
                        found.append(p.meet(f"round {n}", (place, n), lambda offers: [list(offers)] * 3))
                    return found

                return meet

            expected = [[(place, n) for place in range(3)] for n in range(40)]
            assert run(Rendezvous(timeout_s=30.0).register(range(3)), *map(body, range(3))) == [expected] * 3
    finally:
        sys.setswitchinterval(switch)


def test_none_is_a_value_like_any_other(rendezvous):
    answers = run(
        rendezvous.register("ab"),
        lambda p: p.meet("round", None, lambda offers: [None, offers]),
        lambda p: p.meet("round", None, total),
    )
    assert answers == [None, [None, None]]


def test_an_exception_is_a_value_too(rendezvous):
    error = KeyError("just a value")
    answers = run(
        rendezvous.register("ab"),
        lambda p: p.meet("round", error, lambda offers: [offers[0], offers[0]]),
        lambda p: p.meet("round", 0, total),
    )
    assert answers == [error, error]


@pytest.mark.parametrize("counts", [(4, 2), (4, 1), (1, 3), (2, 0, 2)])
def test_the_next_session_may_have_fewer_one_or_more(rendezvous, counts):
    for count in counts:
        assert run(rendezvous.register(range(count)), *[meet_once(1)] * count) == [count] * count


def test_a_session_in_which_nobody_meets_leaves_nothing_behind(rendezvous):
    """A forward in eval mode on four replicas, then training on two: the old design waits for the four."""
    run(rendezvous.register(range(4)), *[lambda p: None] * 4)
    assert run(rendezvous.register(range(2)), *[meet_once(1)] * 2) == [2, 2]


def test_a_session_that_was_never_used_leaves_nothing_behind(rendezvous):
    rendezvous.register(range(4))
    assert run(rendezvous.register(range(1)), meet_once(7)) == [7]


def test_participants_of_a_failed_session_do_not_disturb_the_next(rendezvous):
    old = rendezvous.register("ab")
    run(old, lambda p: 1 / 0, meet_once(1))
    session = rendezvous.register("ab")
    old.participants[0].leave(ValueError("late"))
    assert run(session, meet_once(1), meet_once(2)) == [3, 3]


def test_a_participant_that_raises_ends_the_wait_of_the_others_at_once(rendezvous):
    def fail(p):
        time.sleep(0.05)
        raise MemoryError("out of memory")

    found = run(rendezvous.register(["cpu", "gpu"]), meet_once(1), fail)
    assert isinstance(found[0], ParticipantError)
    assert "participant gpu failed: MemoryError: out of memory" in str(found[0])
    assert found[0].__cause__ is found[1]


def test_a_participant_that_comes_after_the_failure_gets_the_error_too(rendezvous):
    found = run(rendezvous.register("ab"), lambda p: 1 / 0, lambda p: (time.sleep(0.1), p.meet("round", 1, total)))
    assert isinstance(found[0], ZeroDivisionError)
    assert "participant a failed: ZeroDivisionError" in str(found[1])


def test_an_error_while_leading_reaches_everyone(rendezvous):
    def lead(offers):
        raise ValueError("one value per channel")

    found = run(rendezvous.register("abc"), *[lambda p: p.meet("bn call 0", 1, lead)] * 3)
    assert isinstance(found[0], ValueError)
    for error in found[1:]:
        assert isinstance(error, ParticipantError)
        assert "participant a failed while leading 'bn call 0': ValueError: one value per channel" in str(error)
        assert error.__cause__ is found[0]
    assert found[1] is not found[2]


@pytest.mark.parametrize("answers", [[], [1], [1, 2, 3]])
def test_a_wrong_number_of_answers_is_an_error_for_all(rendezvous, answers):
    found = run(rendezvous.register("ab"), *[lambda p: p.meet("round", 1, lambda _: answers)] * 2)
    assert isinstance(found[0], ValueError)
    assert isinstance(found[1], ParticipantError)
    assert "2 offers" in str(found[1])


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_participant_that_skips_a_round_is_named(rendezvous, leaver):
    bodies = [lambda p: [p.meet(tag, 1, total) for tag in ("one", "two")] for _ in range(2)]
    bodies[leaver] = lambda p: p.meet("one", 1, total)
    found = run(rendezvous.register([0, 1]), *bodies)
    assert found[leaver] == 2
    assert isinstance(found[1 - leaver], ParticipantError)
    assert str(found[1 - leaver]) == (
        f"participant {leaver} ended after 'one' and never came to 'two', where participant {1 - leaver} waits"
    )


def test_a_participant_that_never_meets_is_named(rendezvous):
    found = run(rendezvous.register("ab"), meet_once(1), lambda p: "done")
    assert found[1] == "done"
    assert "participant b ended after 'its start' and never came to 'round'" in str(found[0])


def test_different_tags_are_an_error_that_names_both(rendezvous):
    found = run(rendezvous.register("ab"), lambda p: p.meet("layer1", 1, total), lambda p: p.meet("layer2", 1, total))
    for error in found:
        assert type(error) is MismatchError
        assert "'layer1'" in str(error)
        assert "'layer2'" in str(error)


@pytest.mark.parametrize("turns", [False, True])
def test_a_participant_that_does_not_come_is_named_within_the_timeout(turns, clock):
    session = Rendezvous(noun="shard", timeout_s=0.3, turns=turns).register([3, 4])
    release = threading.Event()

    def slow(p):
        until_it_waits(session.participants[0])
        clock.passes(0.31, session)
        assert release.wait(30.0)

    def meet(p):
        try:
            return p.meet("bn call 1", 1, total)
        finally:
            release.set()

    found = run(session, meet, slow)
    assert type(found[0]) is SilenceError
    assert "shard 4 (last at 'its start') did not come to 'bn call 1' within 0.3 s, where shard 3 waits" in str(
        found[0]
    )


@pytest.mark.parametrize("turns", [False, True])
def test_a_participant_that_never_starts_is_named(turns):
    session = Rendezvous(timeout_s=0.2, turns=turns).register("ab")
    with pytest.raises(SilenceError, match="participant a"):
        _ = run_one(session.participants[1])


def run_one(participant):
    with participant:
        return participant.meet("round", 1, total)


def test_the_timeout_counts_from_the_last_sign_of_life(clock):
    """Four shards that take turns of 0.2 s each are no reason to give up after 0.4 s."""
    session = Rendezvous(timeout_s=0.4, turns=True).register(range(4))

    def body(p):
        clock.passes(0.2, session)
        return p.meet("round", 1, total)

    assert run(session, *[body] * 4) == [4] * 4


def test_the_others_wait_longer_for_a_leader_that_itself_waits_with_the_same_timeout(rendezvous, clock):
    rendezvous.timeout_s = 0.3
    session = rendezvous.register("ab")

    def lead(offers):
        clock.passes(0.4, session)
        raise SilenceError("worker 1 said nothing for 0.3 s")

    found = run(session, *[lambda p: p.meet("round", 1, lead)] * 2)
    assert "worker 1 said nothing" in str(found[0])
    assert "worker 1 said nothing" in str(found[1])


def test_a_leader_that_never_ends_is_named(clock):
    release = threading.Event()
    session = Rendezvous(timeout_s=0.2).register("ab")

    def lead(offers):
        clock.passes(0.41, session)
        assert release.wait(30.0)
        return [1, 1]

    def other(p):
        try:
            return p.meet("round", 1, total)
        finally:
            release.set()

    found = run(session, lambda p: p.meet("round", 1, lead), other)
    assert "participant a has led 'round' for more than 0.4 s" in str(found[1])
    assert isinstance(found[0], SilenceError), "the round is over for the leader too"


def test_cancel_ends_the_wait_of_all(rendezvous):
    session = rendezvous.register("ab")
    cause = KeyboardInterrupt()

    def cancel(p):
        until_it_waits(session.participants[0])
        session.cancel("interrupted", cause)
        p.meet("round", 1, total)

    found = run(session, meet_once(1), cancel)
    for error in found:
        assert isinstance(error, ParticipantError)
        assert str(error) == "interrupted"
        assert error.__cause__ is cause


def test_who_catches_the_error_gets_it_again_and_no_hang(rendezvous):
    def stubborn(p):
        for _ in range(3):
            try:
                p.meet("round", 1, total)
            except EvenstepError as error:
                last = error
        return last

    found = run(rendezvous.register("ab"), stubborn, lambda p: 1 / 0)
    assert isinstance(found[0], ParticipantError)


def test_a_handle_that_has_left_cannot_meet(rendezvous):
    session = rendezvous.register("a")
    run(session, meet_once(1))
    session.participants[0].leave()
    with pytest.raises(MismatchError, match="participant a has left"):
        session.participants[0].meet("round", 1, total)


def test_identifiers_must_differ(rendezvous):
    with pytest.raises(ValueError, match="identifier of its own"):
        rendezvous.register(["a", "a"])


def test_only_one_runs_at_a_time_with_turns_and_hooks_frame_every_run():
    log, running = [], []

    def resume(p):
        running.append(p.index)
        assert running == [p.index]
        log.append(("resume", p.index))

    def pause(p):
        log.append(("pause", p.index))
        assert running.pop() == p.index

    session = Rendezvous(turns=True, timeout_s=30.0, resume=resume, pause=pause).register(range(3))

    def body(p):
        for n in range(3):
            time.sleep(0.001)
            p.meet(f"round {n}", 1, total)

    assert run(session, body, body, body) == [None] * 3
    assert log[::2] == [("resume", i) for _, i in log[1::2]]
    assert log[1::2] == [("pause", i) for _, i in log[::2]]
    assert [i for what, i in log if what == "resume"] == [0, 1, 2] + [0, 1, 2] * 3
    assert running == []


@pytest.mark.parametrize("hook", ["resume", "pause"])
def test_a_hook_that_raises_ends_the_session_for_all(hook):
    def fail(p):
        if p.index == 1:
            raise OSError("no state")

    session = Rendezvous(turns=True, timeout_s=30.0, **{hook: fail}).register(range(2))
    found = run(session, meet_once(1), meet_once(1))
    assert isinstance(found[1], OSError)
    assert "participant 1 failed: OSError: no state" in str(found[0])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_it_survives_copying_and_pickling_in_the_midst_of_a_session(duplicate):
    rendezvous = Rendezvous(noun="replica", timeout_s=30.0, turns=True)
    session = rendezvous.register("ab")
    twin = duplicate(rendezvous)
    assert (twin.noun, twin.timeout_s, twin.turns) == ("replica", 30.0, True)
    assert run(twin.register(range(3)), *[meet_once(1)] * 3) == [3] * 3
    assert run(session, meet_once(1), meet_once(2)) == [3, 3]
