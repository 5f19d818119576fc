"""Several machines, each in a network namespace: one fingerprint, whoever is lost; and nobody is left behind."""

import os
import re
import signal
from socket import gethostname

import pytest

import processes
from evenstep.exchange.generations import Generation
from evenstep.launch.job import Job
from evenstep.launch.machines import Machines
from evenstep.testing import Fault, plant
from evenstep.transport.links import ALTERED
from namespaces import Machine, Namespaces, needs_relay, needs_root
from workers import Cli, cli_run

SCRIPT = """
import os, sys, time, torch, evenstep
from torch import nn
import torch.nn.functional as F

steps, pause_s = int(sys.argv[1]), float(sys.argv[2])
g = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(
    torch.randn(16 * steps, 6, generator=g), torch.randint(0, 3, (16 * steps,), generator=g)
)
with evenstep.Run(shards=8, seed=5, progress=False) as run:
    model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3))
    model, _ = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
    if len(sys.argv) > 3:
        run.checkpoint(sys.argv[3], every=5)
    for batch in run.batches(data, batch_size=16):

        def function(part):
            while pause_s and not os.path.exists("go"):  # in the directory in which all are started
                time.sleep(pause_s / 8)
                if run.version < steps - 1:
                    break
            return F.cross_entropy(model(part[0]), part[1])

        run.step(batch, function)
        run.print("step", run.version)
"""
STEPS = 50
pytestmark = pytest.mark.timeout(600)  # machines take their time to start where others work

WIDE = """
import os, time, torch, evenstep
from torch import nn

data = torch.utils.data.TensorDataset(torch.randn(16 * 20, 64, generator=torch.Generator().manual_seed(1)))
with evenstep.Run(shards=8, seed=5, progress=False) as run:
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512))
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 1e-2))
    run.print("bytes", sum(p.numel() * 4 for p in model.parameters()))
    for batch in run.batches(data, batch_size=16):
        run.step(batch, lambda part: model(part[0]).square().mean())
        run.print("step", run.version)
        while run.version in (3, 18) and not os.path.exists(f"go-{run.version}"):
            time.sleep(0.01)
"""


@pytest.fixture
def run(tmp_path):
    """Start a head, on machine 0 of a network, and others."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "token").write_text("a secret")

    class Starts:
        def __init__(self, network):
            self.network, self.count = network, 0
            self.where = f"{network.addresses[0]}:7777"

        def head(self, *options, steps=STEPS, pause_s=0.2, silence_s=30, checkpoints=()):
            log = tmp_path / "head.log"
            options = ("--listen", self.where, "--token-file", tmp_path / "token", *options)
            options += ("--silence", str(silence_s))
            script = (tmp_path / "train.py", str(steps), str(pause_s), *checkpoints)
            return Machine(self.network, 0, log, "run", *options, *script)

        def join(self, number, *options):
            self.count += 1
            log = tmp_path / f"machine-{number}-{self.count}.log"
            options = ("--token-file", tmp_path / "token", *options)
            return Machine(self.network, number, log, "join", self.where, *options)

    return Starts


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The last line of one worker's run of so many steps."""
    script, found = tmp_path_factory.mktemp("alone") / "train.py", {}
    script.write_text(SCRIPT)

    def fingerprint(steps):
        if steps not in found:
            found[steps] = cli_run("run", "-n", "1", script, str(steps), "0").stdout.splitlines()[-1]
        return found[steps]

    return fingerprint


@pytest.fixture(scope="module")
def expected(alone):
    return alone(STEPS)


@needs_root
def test_machines_are_lost_and_come_back_and_the_fingerprint_is_that_of_one(run, expected, tmp_path):
    with Namespaces(3) as network:
        start = run(network)
        head = start.head("-n", "1", "--machines", "2", silence_s=4, pause_s=0.8)
        first = start.join(1, "-n", "2")
        head.awaits("^step 3$")
        first.kill()
        head.awaits(r"machine 1 \(.*\) is lost: .*; workers 1, 2 went with it")
        head.awaits(r"committed, [\d.]+ s after a worker was lost")
        again, other = start.join(1, "-n", "1"), start.join(2, "-n", "1")
        head.awaits("workers from now on: 0, 1, 2")
        network.cut(2)  # both sides live
        head.awaits(r"machine \d .* has said nothing for 4 s; worker \d went with it")
        (tmp_path / "go").touch()
        assert other.ends(60.0) == 7
        assert "has said nothing for 4 s; the workers of this machine were ended" in other.said
        assert head.ends() == 0, head.said
        assert again.ends() == 0, again.said
        assert head.said.splitlines()[-1] == expected


@needs_root
def test_when_the_head_is_lost_everyone_ends_and_resume_goes_on(run, expected, tmp_path):
    with Namespaces(2) as network:
        start = run(network)
        checkpoints = (tmp_path / "checkpoints",)
        head = start.head("-n", "1", "--machines", "2", pause_s=0.2, checkpoints=checkpoints)
        other = start.join(1, "-n", "1")
        head.awaits("^step 12$")
        head.kill()
        assert processes.until(lambda: "the workers of this machine were ended" in other.said, 60.0)
        assert "--resume" in other.said
        assert other.ends() == 7
        assert processes.descendants(other.pid) == {}
        head = start.head("-n", "1", "--machines", "2", "--resume", pause_s=0.2, checkpoints=checkpoints)
        other = start.join(1, "-n", "1")
        head.awaits("^step 25$")
        os.kill(head.pid, signal.SIGTERM)
        assert head.ends() == 75, head.said
        assert other.ends() == 75, other.said
        assert "go on with --resume" in head.said
        head = start.head("-n", "2", "--resume", pause_s=0.0, checkpoints=checkpoints)
        assert head.ends() == 0, head.said
        assert head.said.splitlines()[-1] == expected


@needs_root
def test_a_machine_with_another_script_or_token_is_refused_and_the_run_goes_on(run, alone, tmp_path):
    with Namespaces(2) as network:
        start = run(network)
        head = start.head("-n", "1", "--machines", "2", steps=50, pause_s=0.0)
        head.awaits("other machines can join.*; 1 of 2 are here, and the first step waits for the others")
        (tmp_path / "other").write_text("another secret")
        stranger = start.join(1, "-n", "1", "--token-file", tmp_path / "other")
        assert stranger.ends() == 2
        assert "it does not know the token" in stranger.said
        kept = (tmp_path / "train.py").read_text()
        (tmp_path / "train.py").write_text(kept + "# changed\n")
        changed = start.join(1, "-n", "1")
        assert changed.ends() == 2
        assert re.search(r"script .* \(SHA-256\) is \w+ there, but \w+ on the head", changed.said)
        (tmp_path / "train.py").write_text(kept)
        crowd = start.join(1, "-n", "300")
        assert crowd.ends() == 2
        last = start.join(1, "-n", "1")
        assert head.ends() == 0, head.said
        assert last.ends() == 0
        assert head.said.splitlines()[-1] == alone(50)


@needs_root
def test_machines_that_do_not_reach_each_other_and_one_that_is_stopped_and_wakes_up_later(run, expected, tmp_path):
    with Namespaces(3) as network:
        start = run(network)
        head = start.head("-n", "1", "--machines", "3", silence_s=3, pause_s=0.4)
        first, second = start.join(1, "-n", "1"), start.join(2, "-n", "1")
        head.awaits("^step 3$")
        network.part(1, 2)  # both reach the head
        given_up = int(head.awaits(r"machine (\d) \(.*\) cannot be reached: .*; worker \d went with it")[1])
        lost, left = (
            (first, second) if first.said.startswith(f"evenstep: joined as machine {given_up}") else (second, first)
        )
        assert lost.ends() == 7
        head.awaits("2 workers from now on")
        head.awaits(r"committed, [\d.]+ s after a worker was lost")
        left.signal(signal.SIGSTOP)
        head.awaits(r"machine \d \(.*\) has said nothing for 3 s; worker \d went with it")
        (tmp_path / "go").touch()
        assert head.ends() == 0, head.said
        assert head.said.splitlines()[-1] == expected
        left.signal(signal.SIGCONT)
        assert left.ends() == 7
        assert "the workers of this machine were ended" in left.said


@needs_relay
@pytest.mark.parametrize(("delay_s", "loss", "steps"), [(0.0, 0.02, 50), (0.1, 0.0, 4)])
def test_links_that_lose_packets_or_take_their_time_cost_time_and_no_bit(run, alone, delay_s, loss, steps):
    with Namespaces(2, delay_s=delay_s, loss=loss) as network:
        start = run(network)
        head = start.head("-n", "1", "--machines", "2", steps=steps, pause_s=0.0)
        other = start.join(1, "-n", "2")
        assert head.ends() == 0, head.said
        assert other.ends() == 0, other.said
        assert head.said.splitlines()[-1] == alone(steps)
        assert "lost" not in head.said


@needs_root
@pytest.mark.parametrize("machines", [2, 3])
def test_a_machine_sends_no_more_than_its_share_of_the_gradients(run, machines, tmp_path):
    with Namespaces(machines) as network:
        start = run(network)
        (tmp_path / "train.py").write_text(WIDE)
        head = start.head("-n", "2", "--weights", "1,1", "--machines", str(machines))  # nobody moves shards
        others = [start.join(number, "-n", "1") for number in range(1, machines)]
        gradients = int(head.awaits(r"^bytes (\d+)$")[1])
        head.awaits("^step 3$")
        before = [network.sent_bytes(machine) for machine in range(machines)]
        (tmp_path / "go-3").touch()
        head.awaits("^step 18$")
        sent = [network.sent_bytes(machine) - then for machine, then in enumerate(before)]
        (tmp_path / "go-18").touch()
        assert head.ends() == 0, head.said
        assert [other.ends() for other in others] == [0] * (machines - 1)
    bound = 2 * (machines - 1) / machines * gradients * 1.05
    per_step = [num_bytes / 15 for num_bytes in sent]
    assert max(per_step) <= bound, (per_step, bound)
    assert min(per_step) > 0.5 * bound, "they do send them"


# ---- decisions, in one process ----


class FakeMachine:
    """Keeps what it is told."""

    round, capacity = 0, 1

    def __init__(self, number):
        self.number, self.name, self.told = number, f"node-{number}", []

    def announce(self, generation, bridging, *, lacks_state):
        self.told.append((generation.number, bridging, lacks_state))

    def leave_out(self):
        self.told.append("left out")


@pytest.fixture
def machines():
    """Three, each with one worker of its own number; and what was said."""
    said = []
    machines = Machines(FakeMachine(0), Job("train.py", (), 1), None, said.append)
    for number in (1, 2):
        machines.all[number] = FakeMachine(number)
        machines._places.give(number, [number])
    return machines, said


def test_a_worker_that_shall_go_is_told_also_where_nobody_stays(machines):
    machines, _ = machines
    machines.announce(Generation(7, 0, [0], None, dismissed=[1]))
    assert machines.all[0].told == [(7, None, False)]
    assert machines.all[1].told == [(7, None, False)], "or it would wait for ever, and the run for it"
    assert machines.all[2].told == ["left out"]


def test_data_that_were_altered_on_their_way_are_said_once_with_both_machines(machines):
    machines, said = machines
    machines.say_if_altered(5, 2, 1, "the connection broke: reset by peer")
    machines.broke(5, 2, 1, "the connection broke: reset by peer")
    assert said == [], "a machine that is lost is said where it is"
    for reporter, culprit in ((1, 2), (2, 1)):  # the one that has found it may be heard last
        machines.say_if_altered(5, reporter, culprit, f"the connection broke: {ALTERED} (64 bytes)")
    assert said == [f"between machine 2 (node-2) and machine 1 (node-1) {ALTERED}; the step is done again"]
    machines.say_if_altered(6, 1, 2, f"the connection broke: {ALTERED} (64 bytes)")
    assert len(said) == 2


# ---- a machine that computes wrong, over a loopback ----

SMALL = """
import torch, evenstep
from torch import nn
import torch.nn.functional as F

with evenstep.Run(shards=4, seed=5, progress=False) as run:
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3))
    model, _ = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
    for step in range(15):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(16, 6, generator=generator), torch.randint(0, 3, (16,), generator=generator)
        run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
"""
WRONG = [
    Fault("flip", "parameter", 5, worker=1, bit=100),
    Fault("flip", "node", 2, worker=1, bit=100),
    Fault("flip", "gradient", 60, worker=1, bit=100),  # of 16 in an attempt: not in one that the others have spoiled
]


def test_of_two_machines_one_that_is_wrong_is_named_each_time_and_the_fingerprint_stays(tmp_path):
    (tmp_path / "train.py").write_text(SMALL)
    (tmp_path / "token").write_text("a secret")
    token = ("--token-file", tmp_path / "token")
    faults = plant(WRONG, tmp_path / "faults", in_order=True)
    options = ("--listen", "127.0.0.1:0", *token, "-n", "1", "--machines", "2", "--recheck", "1", "--silence", "30")
    with Cli("run", *options, tmp_path / "train.py", variables=faults) as head:
        assert processes.until(lambda: "\n" in head.stderr, 60.0), "it says how to join"
        where = re.search(r"evenstep join (\S+) ", head.stderr)[1]
        with Cli("join", where, *token, "-n", "1", variables=faults) as joined:
            done, said = head.wait(180), head.stderr
            joined.wait()
    assert done.code == 0, said
    assert done.stdout == cli_run("run", "-n", "1", str(tmp_path / "train.py")).stdout
    who = rf"worker 1 \(machine {gethostname()}, process \d+, core \d+\)"
    machines = re.escape(f"machine 0 ({gethostname()}) and machine 1 ({gethostname()})")
    for line in (
        rf"at step 1 {who} holds a wrong 'model\.0\.weight': element \[\d, \d\] is .*; it gets a new copy of the state",
        rf"between {machines} {ALTERED}; the step is done again",
        rf"{who} computed wrong in step \d+, shard \d, gradient of 'model\.\S+': element .*; it is dismissed, and .*",
        r"1 workers from now on: 0",
    ):
        assert re.search(rf"^evenstep: {line}$", said, re.MULTILINE), f"no {line!r} in\n{said}"
