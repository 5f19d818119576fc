"""The workers of a run: what they exchange, and how failure reaches everyone."""

import os
import resource
import signal
import time

import pytest
import torch
from fakes import FakeMembership, FakeRounds, Table, groups, together

import processes
from evenstep.core.errors import Dismissed, MismatchError, PeerError, SilenceError
from evenstep.exchange.generations import Generation
from evenstep.exchange.group import Group
from evenstep.native import core
from evenstep.plan import tree
from evenstep.transport.segment import Segment
from workers import inherited_segment, run_outcomes, run_workers


def join(worker: int, timeout_s: float = 30.0) -> Group:
    return Group.around(inherited_segment(), worker, timeout_s)


def rows_of(worker: int, count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(worker)
    return torch.randn(count, width, generator=generator).to(dtype)


# ---- gather ----


def test_uneven_shares_of_any_width_come_in_worker_order():
    widths = [0, 1, 3, 4097, 70_000]  # a slot holds 65536 float32

    def body(worker):
        group = join(worker)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.bool):
            for width in widths:
                for shares in ([3, 3, 2], [1, 5, 1]):
                    every = [rows_of(w, count, width, dtype) for w, count in enumerate(shares)]
                    found = group.gather(f"{dtype} {width} {shares}", every[worker], shares)
                    assert torch.equal(found, torch.cat(every))

    run_workers(3, body)


def test_workers_without_rows_take_no_part_and_are_not_waited_for():
    def body(worker):
        group = join(worker)
        for number in range(50):
            shares = [[2, 0, 1], [1, 1, 0], [0, 0, 4], [0, 1, 0]][number % 4]
            every = [rows_of(w, count, 20) for w, count in enumerate(shares)]
            for layer in range(
                number % 4
            ):  # the steps of an uneven batch: all its exchanges are among the same workers
                if shares[worker]:
                    found = group.gather(f"batch {number} layer {layer}", every[worker], shares)
                    assert torch.equal(found, torch.cat(every))
            assert group.gather_json(f"batch {number}", worker) == [0, 1, 2]

    run_workers(3, body)


def test_a_worker_without_rows_can_receive_those_of_the_others_however_slow_it_is():
    def body(worker):
        group = join(worker)
        shares, width = [1, 1, 0], 400_000  # seven pieces: the others would run ahead if it were not waited for
        every = [rows_of(w, count, width) for w, count in enumerate(shares)]
        for number in range(4):
            if worker == 2:
                time.sleep(0.01)
            assert torch.equal(group.gather(f"slow {number}", every[worker], shares, everyone=True), torch.cat(every))

    run_workers(3, body)


def test_more_rows_than_a_slot_has_room_for_are_exchanged_in_pieces():
    def body(worker):
        group = join(worker)
        shares = [200_001, 7]
        every = [rows_of(w, count, 1) for w, count in enumerate(shares)]
        assert torch.equal(group.gather("tall", every[worker], shares), torch.cat(every))
        same = rows_of(worker, 90_000, 2)
        assert group.gather("alike", same).shape == (180_000, 2)

    run_workers(2, body)


def test_nothing_at_all_can_be_exchanged():
    def body(worker):
        group = join(worker)
        return group.gather("none", torch.empty(0, 5)).shape, group.gather("no width", torch.empty(1, 0)).shape

    assert run_workers(2, body) == [(torch.Size([0, 5]), torch.Size([2, 0]))] * 2


def test_rows_need_not_be_contiguous():
    def body(worker):
        group = join(worker)
        return group.gather("transposed", rows_of(worker, 4, 3).t()).shape

    assert run_workers(2, body) == [torch.Size([6, 4])] * 2


def test_a_worker_alone_needs_nobody():
    group = Group.around(Segment.create(1), 0, 1.0)
    rows = torch.randn(3, 100_000)
    assert torch.equal(group.gather("alone", rows), rows)
    assert torch.equal(group.gather("alone", rows, [3]), rows)
    assert group.gather_json("alone", {"a": [1.5]}) == [{"a": [1.5]}]
    group.barrier("alone")
    group.close()


def test_json_values_of_any_size_are_exchanged():
    sizes = [0, 1, 2037, 2038, 2039, 2040, 2041, 300_000]  # 2048 bytes go at once, of which 8 say how many there are

    def body(worker):
        group = join(worker)
        for size in sizes:
            mine = {"worker": worker, "text": "é\0" * (size if worker == 1 else 3)}
            found = group.gather_json(f"size {size}", mine)
            assert [value["worker"] for value in found] == [0, 1, 2]
            assert [len(value["text"]) for value in found] == [6, 2 * size, 6]
        for size in sizes:
            text = "x" * size
            assert group.gather_json("exactly", text) == [text] * 3
        return group.gather_json("floats", [0.1 + worker, float("inf"), None])

    assert run_workers(3, body)[0] == [[0.1 + w, float("inf"), None] for w in range(3)]


def test_the_sum_over_shards_is_the_tree_sum_on_every_worker():
    rows = torch.randn(7, 33)

    def body(worker):
        first = [0, 3, 5][worker]
        return join(worker).sum("sum", rows[first : [3, 5, 7][worker]], [3, 2, 2]).numpy().tobytes()

    expected = tree.reduce(list(rows), torch.add).numpy().tobytes()
    assert run_workers(3, body) == [expected] * 3


def test_thousands_of_exchanges_of_all_and_of_some_never_mix():
    def body(worker):
        group = join(worker)
        for number in range(1500):
            if number % 3 == 0:
                group.barrier(f"round {number}")
            elif number % 7 == 1:
                assert group.gather_json("same tag", number) == [number] * 3
            else:
                rows = torch.full((1 + worker % 2, 16), float(1000 * worker + number))
                found = group.gather("same tag", rows, [1, 2, 1])
                assert found[:, 5].tolist() == [number, 1000 + number, 1000 + number, 2000 + number]

    run_workers(3, body)


def test_a_group_knows_its_rounds_by_what_they_promise_only(new_segment):
    def body(group):
        rows = rows_of(group.worker, 1 + group.worker, 300)  # 16 bytes go at once
        every = torch.cat([rows_of(worker, 1 + worker, 300) for worker in range(3)])
        assert torch.equal(group.gather("all", rows, [1, 2, 3], everyone=True), every)
        if group.worker != 1:
            group.gather("some", rows[:1], [1, 0, 1])
        return group.gather_json("end", group.worker)

    made = groups(new_segment(3), 3, most_bytes=16)
    assert together(made, body) == [[0, 1, 2]] * 3
    assert set(made[0]._rounds.among) == {(0, 1, 2), (0, 2)}, "who takes part is said with every post"


def test_a_new_generation_has_other_members_and_later_numbers(new_segment):
    membership = FakeMembership(Generation(4, 7, [1, 2], [1.0, 3.0]))
    group = Group(new_segment(3), FakeRounds(Table(), 2), membership)
    assert group.left
    group.enter()
    assert (group.generation, group.members, group.rank, group.num_workers) == (4, [1, 2], 1, 2)
    assert (group.weights, group.exchanges, group.left) == ([1.0, 3.0], 7, False)
    with pytest.raises(Dismissed):
        group.enter()


# ---- failure ----


def test_workers_at_different_exchanges_both_get_an_error_that_names_both():
    def body(worker):
        group = join(worker)
        group.barrier("together")
        with pytest.raises(MismatchError) as caught:
            group.gather(["layer1.bn: forward", "layer2.bn: forward"][worker], torch.zeros(1, 4))
        return str(caught.value)

    for text in run_workers(2, body):
        assert "'layer1.bn: forward' with 16 bytes" in text
        assert "'layer2.bn: forward' with 16 bytes" in text
        assert "worker 0 is at" in text
        assert "worker 1 is at" in text


def test_workers_that_offer_different_amounts_get_an_error_not_a_part():
    def body(worker):
        group = join(worker)
        with pytest.raises(MismatchError, match=r"128 bytes.*256 bytes|256 bytes.*128 bytes"):
            group.gather("same tag", torch.zeros(1, 32 * (1 + worker)))

    run_workers(2, body)


def test_workers_that_offer_a_different_number_of_pieces_get_an_error_at_the_first():
    def body(worker):
        with pytest.raises(MismatchError, match=r"same \(1 of 2\)"):
            join(worker).gather("same", torch.zeros(1, 65536 * (1 + worker)))

    run_workers(2, body)


def test_a_worker_that_expects_an_exchange_of_some_meets_one_of_all():
    def body(worker):
        group = join(worker, timeout_s=20.0)
        try:
            if worker == 0:
                group.barrier("the end of the run")
            else:
                group.gather("layer 3", torch.zeros(1, 1), [1, 1])
        except MismatchError as error:
            group.fail(f"MismatchError: {error}")
            raise

    outcomes = run_outcomes(2, body)
    assert {outcome.kind for outcome in outcomes} == {"MismatchError", "PeerError"}
    for outcome in outcomes:
        assert "'the end of the run'" in outcome.text
        assert "'layer 3'" in outcome.text


@pytest.mark.parametrize("way", ["kill", "exit", "exit before joining"])
def test_a_worker_that_is_gone_is_noticed_and_named(way):
    def body(worker):
        if worker == 1 and way == "exit before joining":
            segment = inherited_segment()
            core.set_pid(segment.base, 1, os.getpid())  # the supervisor does this
            os._exit(0)
        group = join(worker)
        if way != "exit before joining":
            group.barrier("all are here")
        if worker == 1:
            os._exit(0) if way == "exit" else os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerError) as caught:  # and no SilenceError
            group.barrier("step 7: result")
        group.close()
        return caught.value.worker, str(caught.value)

    outcomes = run_outcomes(3, body)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.kind is None, outcome.text
        culprit, text = outcome.value
        assert culprit == 1
        assert f"its last exchange was '{'none' if 'before' in way else 'all are here'}'" in text


def test_a_dead_worker_is_noticed_by_a_process_with_thousands_of_files_open():
    def body(worker):
        group = join(worker)
        group.barrier("all are here")
        if worker == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 4096), limit))
        while os.open(os.devnull, os.O_RDONLY) < 1500:
            pass
        with pytest.raises(PeerError):
            group.barrier("next")

    assert run_outcomes(2, body)[0].kind is None


def test_a_stopped_worker_ends_the_wait_with_an_error_that_says_who_where_and_since_when():
    def body(worker):
        group = join(worker)
        group.gather_json("step 4: result", worker)
        if worker == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            group.barrier("step 5: bn1 forward")  # what was offered before the failure is still there
            with pytest.raises(PeerError, match="step 5: bn1 forward"):
                group.barrier("step 5: bn1 backward")
            return os.getpid()
        assert processes.until(lambda: processes.is_stopped(core.pid(group.segment.base, 1)))
        group.timeout_s = 0.3
        with pytest.raises(SilenceError) as caught:
            group.barrier("step 5: bn1 forward")
        group.fail(str(caught.value))
        os.kill(core.pid(group.segment.base, 1), signal.SIGCONT)
        return str(caught.value)

    text, pid = run_workers(2, body)
    assert f"worker 1 (pid {pid}) said nothing for 0.3 s" in text
    assert "worker 0 waits for it at 'step 5: bn1 forward'" in text
    assert "its last exchange was 'step 4: result'" in text
    assert "Run(timeout_s=...)" in text


def test_a_worker_that_never_came_is_called_so():
    def body(worker):
        if worker == 1:
            return ""
        with pytest.raises(SilenceError) as caught:
            join(worker, timeout_s=0.2).barrier("join")
        return str(caught.value)

    text = run_workers(2, body)[0]
    assert "worker 1 (which has not joined yet) said nothing for 0.2 s" in text


def test_a_failure_reaches_those_who_wait_and_those_who_come_later_with_its_text():
    def body(worker):
        group = join(worker)
        if worker == 1:
            group.fail("Traceback ...\nValueError: a bad day \udcff")
            group.fail("something else")
            return None
        if worker == 2:
            while core.aborted(group.segment.base) is None:
                time.sleep(0.001)
        with pytest.raises(PeerError) as caught:
            group.gather_json("step 1", None)
        return str(caught.value), caught.value.worker

    for worker, found in enumerate(run_workers(3, body)):
        if worker != 1:
            text, culprit = found
            assert text.startswith(f"worker 1 failed, so worker {worker} stops too:")
            assert text.endswith("ValueError: a bad day \\udcff")
            assert culprit == 1


def test_a_worker_that_waits_can_be_interrupted():
    def body(worker):
        group = join(worker)
        if worker == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest in the background has it ignored
            with pytest.raises(KeyboardInterrupt):
                group.barrier("waiting")
            group.fail("interrupted")
            return
        while core.last_post(group.segment.base, 0)[0] == 0:
            time.sleep(0.001)
        os.kill(core.pid(group.segment.base, 0), signal.SIGINT)
        while core.aborted(group.segment.base) is None:  # it does not come to the barrier, so only the signal can help
            time.sleep(0.001)

    run_workers(2, body)
