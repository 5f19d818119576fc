"""Whatever a rank or a shard does wrong, the others get an error that names layer, call and culprit, in time."""

import os
import signal
import threading
import time

import pytest
import spans
import torch
from torch import distributed, nn

import evenstep
import processes
from evenstep.core.errors import MismatchError, SilenceError
from evenstep.nn import SyncBatchNorm1d, convert_sync_batchnorm, process_group
from workers import run_outcomes

TIMEOUT_S = 0.7  # of ranks that are to miss another
PATIENT_S = 40.0  # of those that are to hear of it before
REPORT_S = {2: 0.5, 3: 4.0}  # with a third rank there is one whose report is waited for, on a slow machine too
IN_TIME_S = 20.0  # soon, on such a machine


@pytest.fixture(autouse=True)
def ranks_that_are_left_say_so_soon(monkeypatch, request):
    num_ranks = getattr(request.node, "callspec", None) and request.node.callspec.params.get("num_ranks")
    monkeypatch.setattr(process_group, "_REPORT_S", REPORT_S[num_ranks or 2])
    monkeypatch.setattr(process_group, "_STORE_S", PATIENT_S)


class Two(nn.Module):
    def __init__(self, features=(3, 3)):
        super().__init__()
        self.a, self.b = (nn.BatchNorm1d(f) for f in features)
        convert_sync_batchnorm(self)


def x(features=3):
    return torch.randn(4, features, requires_grad=True)


def note(folder, what, rank):
    """Let the other ranks know that this one has come somewhere."""
    (folder / f"{what} {rank}").touch()


def until_all(folder, what, ranks):
    """Wait until ranks have come somewhere."""
    assert processes.until(lambda: all((folder / f"{what} {rank}").exists() for rank in ranks), PATIENT_S)


def die_once(folder, ranks):
    """Die when others have come so far that they miss this one where they are to."""
    until_all(folder, "ready", ranks)
    os.kill(os.getpid(), signal.SIGKILL)


def silence_on(others, num_ranks, body, folder):
    """Run ranks of which some must get a SilenceError in time; return the messages of those."""

    def timed(rank):
        begin = time.monotonic()
        try:
            body(rank)
        except SilenceError as error:
            return str(error), time.monotonic() - begin
        finally:
            note(folder, "over", rank)
            if rank in others:
                until_all(folder, "over", others)  # a rank that has the error does not pull the others down with it
        return None

    def without_end(rank):
        value = timed(rank)
        raise _Answer(repr(value))  # past the barrier at the end: the group is broken

    outcomes = spans.rank_outcomes(num_ranks, without_end, folder, timeout_s=PATIENT_S)
    messages = []
    for rank in others:
        assert outcomes[rank].kind == "_Answer", outcomes[rank].text
        value = eval(outcomes[rank].text.rpartition("_Answer: ")[2])  # our own repr
        assert value is not None, f"rank {rank} got no error"
        assert value[1] < IN_TIME_S
        messages.append(value[0])
    return messages


class _Answer(Exception):
    pass


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_dies_is_named(num_ranks, tmp_path):
    others = [r for r in range(num_ranks) if r != 1]

    def body(rank):
        model = Two()
        model.a(x())
        if rank == 1:
            die_once(tmp_path, others)
        note(tmp_path, "ready", rank)
        model.b(x())

    for message in silence_on(others, num_ranks, body, tmp_path):
        assert "rank 1 did not come to 'b call 0 forward'" in message


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_raises_and_stays_is_named(num_ranks, tmp_path):
    others = [r for r in range(num_ranks) if r != 1]

    def body(rank):
        model = Two()
        model.a(x())
        if rank == 1:
            try:
                raise MemoryError
            except MemoryError:
                until_all(tmp_path, "over", others)
            return
        spans.set_timeout(TIMEOUT_S)
        time.sleep(0.3 * TIMEOUT_S * (rank == 2))  # its own wait would end later, but it must say so in time
        model.a(x())

    for message in silence_on(others, num_ranks, body, tmp_path):
        assert "rank 1 did not come to 'a call 1 forward'" in message


def test_a_rank_that_stops_is_named(tmp_path):
    def body(rank):
        model = Two()
        if rank == 1:
            until_all(tmp_path, "over", [0])
            return
        spans.set_timeout(TIMEOUT_S)
        model.a(x())

    (message,) = silence_on([0], 2, body, tmp_path)
    assert "rank 1 did not come to 'a call 0 forward', where rank 0 waits" in message


def test_a_rank_that_skips_backward_is_named(tmp_path):
    def body(rank):
        y = Two().a(x())
        if rank == 0:
            spans.set_timeout(TIMEOUT_S)
            y.square().sum().backward()
        else:
            until_all(tmp_path, "over", [0])

    (message,) = silence_on([0], 2, body, tmp_path)
    assert "rank 1 did not come to 'a call 0 backward'" in message


def test_a_store_that_does_not_answer_is_no_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(process_group, "_STORE_S", 1.0)

    def body(rank):
        if rank == 0:
            die_once(tmp_path, [1])

        def stuck(*_):
            time.sleep(30.0)

        distributed.distributed_c10d._get_default_store = lambda: type("Store", (), {"set": stuck})()
        note(tmp_path, "ready", 1)
        Two().a(x())

    (message,) = silence_on([1], 2, body, tmp_path)
    assert (
        "a rank (perhaps 0, which keeps the store) did not come or failed on the way to 'a call 0 forward'" in message
    )


@pytest.mark.parametrize("features", [(3, 3), (3, 5)], ids=["of one size", "of different sizes"])
def test_ranks_at_different_layers_all_learn_it_at_once(features, tmp_path):
    def body(rank):
        model = Two(features)
        begin = time.monotonic()
        with pytest.raises(MismatchError) as caught:
            model.b(x(features[1])) if rank == 1 else model.a(x(features[0]))
        assert time.monotonic() - begin < IN_TIME_S
        return str(caught.value)

    for message in spans.run_ranks(3, body, tmp_path, timeout_s=PATIENT_S):
        assert "rank 0 is at 'a call 0 forward', rank 1 is at 'b call 0 forward', rank 2 is at 'a call 0" in message


def test_ranks_at_different_calls_all_learn_it_at_once(tmp_path):
    """Rank 1 skips the second call of a layer and goes on to backward."""

    def body(rank):
        model = Two()
        y = model.a(x())
        with pytest.raises(MismatchError) as caught:
            model.a(x()) if rank == 0 else y.square().sum().backward()
        return str(caught.value)

    for message in spans.run_ranks(2, body, tmp_path):
        assert "rank 0 is at 'a call 1 forward', rank 1 is at 'a call 0 backward'" in message


def test_layers_without_a_name_are_told_apart_by_their_size(tmp_path):
    def body(rank):
        with pytest.raises(MismatchError) as caught:
            SyncBatchNorm1d(3 + rank)(x(3 + rank))
        return str(caught.value)

    assert "rank 1 is at 'SyncBatchNorm1d(4) call 0 forward'" in spans.run_ranks(2, body, tmp_path)[0]


def test_subgroups_meet_among_themselves_and_the_rest_is_alone(tmp_path):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(4, 3, generator=generator) for _ in range(3)]

    def body(rank):
        group = distributed.new_group([0, 2])
        layer = convert_sync_batchnorm(nn.BatchNorm1d(3, momentum=1.0), process_group=group)
        layer(parts[rank])
        if rank != 1:  # a group that is made later counts its calls from the start
            other = distributed.new_group([0, 2], use_local_synchronization=True)
            convert_sync_batchnorm(layer, process_group=other)(parts[rank])
        return layer.running_mean

    found = spans.run_ranks(3, body, tmp_path)
    expected = [torch.cat([parts[0], parts[2]]).mean(0), parts[1].mean(0), torch.cat([parts[0], parts[2]]).mean(0)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_lost_rank_of_a_subgroup_is_named_by_its_global_number(tmp_path):
    def body(rank):
        group = distributed.new_group([1, 2])
        layer = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), process_group=group)
        if rank == 0:
            until_all(tmp_path, "over", [1])  # the others still meet through its store
        if rank == 2:
            die_once(tmp_path, [1])
        if rank == 1:
            note(tmp_path, "ready", 1)
            layer(x())

    (message,) = silence_on([1], 3, body, tmp_path)
    assert "rank 2 did not come to '0 call 0 forward', where rank 1 waits" in message


def test_layers_that_come_and_go_do_not_confuse_the_call_numbers(tmp_path):
    """Ranks free layers at different times and must not count a new layer's calls by the address of an old one."""

    def body(rank):
        kept = []
        for n in range(20):
            layer = SyncBatchNorm1d(3)
            layer(x())
            if n % 2 == rank:
                kept.append(layer)
        return True

    assert spans.run_ranks(2, body, tmp_path) == [True, True]


def in_a_run(step, num_workers=2, timeout_s=PATIENT_S):
    def body(worker):
        model = Two()
        with evenstep.Run(shards=4, quiet=True, timeout_s=timeout_s) as run:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            run.step(torch.arange(24.0).view(8, 3), lambda part: step(model, int(part[0, 0]) // 6, part))

    begin = time.monotonic()
    outcomes = run_outcomes(num_workers, body, shards=4)
    assert time.monotonic() - begin < IN_TIME_S
    return outcomes


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("shard", [0, 3])
def test_a_shard_that_raises_ends_the_step_for_all(shard, num_workers):
    def step(model, mine, part):
        y = model.a(part)
        if mine == shard:
            raise LookupError("bad sample")
        return model.b(y).square().mean()

    outcomes = in_a_run(step, num_workers)
    kinds = {outcome.kind for outcome in outcomes}
    assert "LookupError" in kinds
    assert kinds <= {"LookupError", "PeerError"}
    assert all("bad sample" in outcome.text for outcome in outcomes)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_a_shard_that_skips_a_layer_is_named(num_workers):
    def step(model, mine, part):
        y = model.a(part)
        return (y if mine == 3 else model.b(y)).square().mean()

    outcomes = in_a_run(step, num_workers)
    assert all(outcome.kind is not None for outcome in outcomes)
    text = "".join(outcome.text for outcome in outcomes)
    assert "b call 0" in text
    assert ("shard 3" in text) or ("worker" in text)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_shards_at_different_layers_are_named(num_workers):
    outcomes = in_a_run(
        lambda model, mine, part: (model.b if mine >= 2 else model.a)(part).square().mean(), num_workers
    )
    text = "".join(outcome.text for outcome in outcomes)
    assert all(outcome.kind in ("MismatchError", "PeerError") for outcome in outcomes)
    assert "a call 0" in text
    assert "b call 0" in text


def test_a_shard_that_does_not_come_is_named():
    missed = threading.Event()

    def step(model, mine, part):
        try:
            if mine == 1:
                missed.wait(PATIENT_S)
            return model.a(part).square().mean()
        finally:
            missed.set()

    (outcome,) = in_a_run(step, 1, TIMEOUT_S)
    assert outcome.kind == "SilenceError"
    assert "shard 1 (last at 'its start') did not come to" in outcome.text
