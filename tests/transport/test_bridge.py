"""Bridges between machines that are threads of this process: what is posted on one is there on the others."""

import re
import threading
import time

import pytest
import torch
from fake_links import Network

from evenstep.core import points
from evenstep.native import core
from evenstep.testing.faults import flip
from evenstep.transport.bridge import Bridge
from evenstep.transport.links import HEADS, RANGES, REST, WORDS
from evenstep.transport.outbox import EVERYONE, POST, PUT, Outbox, Request
from evenstep.transport.segment import Segment

ROUND = 1 << 32


class Machines:
    """Machines with a segment and a bridge each; a context manager."""

    def __init__(self, workers, silence_s=None):
        self.workers, self.network = workers, Network(len(workers))
        self.segments = [Segment.create(8) for _ in workers]
        self.outcomes = [None] * len(workers)
        self.bridges = [
            Bridge(segment, 1, workers, links, silence_s)
            for segment, links in zip(self.segments, self.network.links, strict=True)
        ]
        self.threads = [threading.Thread(target=self._run, args=(m,)) for m in range(len(workers))]
        self.boxes = {w: Outbox(self.segments[m], w) for m, mine in enumerate(workers) for w in mine}
        self.home = {w: m for m, mine in enumerate(workers) for w in mine}

    def _run(self, machine):
        self.outcomes[machine] = self.bridges[machine].run()

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        for bridge in self.bridges:
            bridge.stop()
        self.network.cut.set()
        for thread in self.threads:
            thread.join(30.0)
        until(lambda: not [t for t in threading.enumerate() if t.name.startswith("evenstep-bridge")])
        for segment in self.segments:
            segment.close()

    def post(self, worker, seq, tag, values, local=1):
        segment, data = self.segments[self.home[worker]], torch.tensor(values, dtype=torch.float64)
        core.post(segment.base, worker, seq, tag, data.data_ptr(), data.nbytes)
        self.boxes[worker].push(Request(POST, 1, seq=seq, num_bytes=data.nbytes, local=local))

    def collect(self, machine, worker, seq, tag, count, timeout_s=30.0):
        out = torch.empty(count, dtype=torch.float64)
        rc = core.collect(
            self.segments[machine].base, worker, seq, tag, out.data_ptr(), out.nbytes, 0, int(timeout_s * 1e9)
        )
        return out.tolist() if rc == core.ES_OK else rc


def until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def test_what_is_posted_on_one_machine_is_posted_on_all():
    with Machines([[0], [1], [2]]) as machines:
        for worker in range(3):
            machines.post(worker, ROUND, "step 0: result", [float(worker), 0.5])
        for machine in range(3):
            for worker in range(3):
                assert machines.collect(machine, worker, ROUND, "step 0: result", 2) == [float(worker), 0.5]


def test_a_tag_and_the_number_of_bytes_arrive_too():
    with Machines([[0], [1]]) as machines:
        machines.post(0, ROUND, "é" * 50, [1.0])
        assert machines.collect(1, 0, ROUND, "another", 1) == core.ES_MISMATCH
        assert machines.collect(1, 0, ROUND, "é" * 50, 2) == core.ES_MISMATCH
        assert machines.collect(1, 0, ROUND, "é" * 50, 1) == [1.0]


def test_tags_are_told_apart_also_behind_what_a_slot_keeps_of_them():
    long = "layer " * 60
    with Machines([[0], [1]]) as machines:
        machines.post(0, ROUND, long + "a", [1.0])
        assert machines.collect(1, 0, ROUND, long + "b", 1) == core.ES_MISMATCH
        assert machines.collect(1, 0, ROUND, long + "a", 1) == [1.0]


def test_words_are_expected_before_they_come():
    with Machines([[0], [1]]) as machines:
        until(lambda: machines.network.expected[0, 1, WORDS] == 4)


def test_the_posts_of_a_machine_go_as_one_message_when_all_who_take_part_have_posted():
    with Machines([[0, 1, 2], [3]]) as machines:
        machines.post(0, ROUND, "a", [0.0], local=2)
        time.sleep(0.05)
        assert machines.network.sent[0, 1, WORDS] == 0
        machines.post(2, ROUND, "a", [2.0], local=2)
        assert machines.collect(1, 2, ROUND, "a", 1) == [2.0]
        assert machines.collect(1, 0, ROUND, "a", 1) == [0.0]
        assert machines.network.sent[0, 1, WORDS] == 1


@pytest.mark.parametrize("count", [0, 1, 400, 30_000])
def test_what_is_posted_may_have_any_size(count):
    with Machines([[0, 1], [2]]) as machines:
        for worker in (0, 1):
            machines.post(worker, ROUND, "a", [0.5 * worker] * count, local=2)
        for worker in (0, 1):
            assert machines.collect(1, worker, ROUND, "a", count) == [0.5 * worker] * count
        assert machines.network.sent[0, 1, WORDS] == 1
        assert machines.network.sent[0, 1, REST] == (count >= 400)


def test_hundreds_of_exchanges_both_ways_keep_their_order():
    with Machines([[0], [1]]) as machines:
        failures = []

        def body(me):
            for number in range(1, 301):
                seq = number << 32
                machines.post(me, seq, f"round {number}", [me + 0.001 * number])
                found = machines.collect(me, 1 - me, seq, f"round {number}", 1)
                if found != [1 - me + 0.001 * number]:
                    failures.append((me, number, found))
                    return

        threads = [threading.Thread(target=body, args=(me,)) for me in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        assert not failures


def test_a_range_is_put_at_the_same_place_and_its_word_is_set_then():
    with Machines([[0], [1], [2]]) as machines:
        words = [segment.memory.words(4) for segment in machines.segments]
        regions = [
            segment.memory.reserve(4096).tensor(torch.Size([1024]), torch.float32) for segment in machines.segments
        ]
        regions[0].copy_(torch.arange(1024.0))
        memory = machines.segments[0].memory
        offset, word = memory.locate(regions[0]), memory.locate(words[0][2:3])
        machines.boxes[0].push(Request(PUT, 1, EVERYONE, offset, 4096, word, 77))
        for machine in (1, 2):
            until(lambda machine=machine: core.load(words[machine][2:3].data_ptr()) == 77)
            assert torch.equal(regions[machine], torch.arange(1024.0))
        assert words[0].tolist() == [0, 0, 0, 0]
        regions[0].zero_()
        machines.boxes[0].push(Request(PUT, 1, 2, offset, 4096, word, 78))
        until(lambda: words[2][2] == 78)
        assert not regions[2].any()
        assert regions[1].any(), "it was for the other machine"
        assert [machines.network.sent[0, 1, channel] for channel in (HEADS, RANGES)] == [1, 1]


def test_ranges_are_expected_while_earlier_ones_are_on_their_way():
    with Machines([[0], [1]]) as machines:
        here, there = (segment.memory for segment in machines.segments)
        words = [memory.words(4) for memory in (here, there)]
        region = here.reserve(256).tensor(torch.Size([64]), torch.float32)
        held = machines.network.hold(0, 1, RANGES)
        for number in range(4):
            place = here.locate(words[0][number : number + 1])
            machines.boxes[0].push(Request(PUT, 1, 1, here.locate(region), 256, place, 1))
        until(lambda: machines.network.expected[0, 1, RANGES] == 4)
        assert words[1].tolist() == [0, 0, 0, 0]
        held.set()
        until(lambda: words[1].tolist() == [1, 1, 1, 1])


def test_a_range_that_is_altered_on_its_way_ends_the_bridge_and_its_word_is_not_set():
    with Machines([[0], [1]]) as machines:
        words = [segment.memory.words(1) for segment in machines.segments]
        region = machines.segments[0].memory.reserve(4096).tensor(torch.Size([1024]), torch.float32)
        memory = machines.segments[0].memory
        points.arm(None, lambda what, tensor: flip(tensor, 999) if what == "node" else None)
        try:
            machines.boxes[0].push(Request(PUT, 1, 1, memory.locate(region), 4096, memory.locate(words[0]), 1))
            machines.threads[1].join(30.0)
        finally:
            points.arm(None)
        lost, error = machines.outcomes[1]
        assert lost == 0
        assert re.search(r"not what was sent.*\(4096 bytes from machine 0 to machine 1\)", str(error))
        assert words[1].tolist() == [0]


def test_a_word_may_be_set_without_a_range_and_wakes_whoever_waits():
    with Machines([[0], [1]]) as machines:
        word = machines.segments[0].memory.words(1)
        there = machines.segments[1].memory.words(1)
        machines.boxes[0].push(Request(PUT, 1, 1, word=machines.segments[0].memory.locate(word), value=5))
        until(lambda: there[0] == 5)


def test_what_was_asked_for_in_an_earlier_generation_is_not_carried():
    with Machines([[0], [1]]) as machines:
        machines.boxes[0].push(Request(POST, 0, seq=ROUND))
        machines.post(0, 2 * ROUND, "later", [1.0])
        assert machines.collect(1, 0, 2 * ROUND, "later", 1) == [1.0]
        assert machines.network.sent[0, 1, WORDS] == 1


def test_a_machine_that_is_lost_ends_the_bridge_and_is_named():
    with Machines([[0], [1]]) as machines:
        machines.network.cut.set()
        for thread in machines.threads:
            thread.join(30.0)
        assert [outcome[0] for outcome in machines.outcomes] == [1, 0]
        assert "the network is cut" in str(machines.outcomes[0][1])
        assert core.aborted(machines.segments[0].base) == (
            1,
            "the connection to the machine of worker 1 broke: the network is cut",
        )


def test_a_failure_on_one_machine_reaches_the_others_once():
    with Machines([[0], [1], [2]]) as machines:
        core.abort_all(machines.segments[1].base, 1, 1, "Traceback\n" + "é" * 9000 + "\nValueError: a bad day")
        for machine in (0, 2):
            until(lambda machine=machine: core.aborted(machines.segments[machine].base) is not None)
            culprit, text = core.aborted(machines.segments[machine].base)
            assert culprit == 1
            assert text.endswith("é\nValueError: a bad day")
        time.sleep(0.1)
        assert sum(count for (_, _, channel), count in machines.network.sent.items() if channel == WORDS) == 2


@pytest.mark.long
def test_machines_that_have_nothing_to_say_beat_and_none_is_lost():
    begin = time.monotonic()
    with Machines([[0], [1]], silence_s=1.5) as machines:
        until(lambda: all(machines.network.sent[way] >= 6 for way in ((0, 1, WORDS), (1, 0, WORDS))))
        sent = machines.network.sent[0, 1, WORDS]
        assert sent <= (time.monotonic() - begin) / 0.3 + 1
        assert machines.outcomes == [None, None], "though they were silent for longer than that"
        assert core.aborted(machines.segments[0].base) is None


@pytest.mark.long
def test_a_way_that_is_cut_without_a_word_is_found_by_silence_and_only_its_ends_are_lost_to_each_other():
    with Machines([[0], [1], [2]], silence_s=2.0) as machines:
        machines.network.deaf |= {(1, 2), (2, 1)}
        for machine in (1, 2):
            machines.threads[machine].join(30.0)
        assert [outcome and outcome[0] for outcome in machines.outcomes] == [None, 2, 1]
        assert core.aborted(machines.segments[1].base) == (
            2,
            "the connection to the machine of worker 2 broke: it has said nothing for 2 s",
        )
