"""What a second machine costs and brings: steps over links of three speeds, the loss of a machine, a newcomer.

Machines are network namespaces of this one, each with a worker and, as far as there are enough, a core of its own: what
one of them does costs the other nothing. Namespaces need root; without it a sentence says so. DDP trains the same over
gloo on the same links and cores, in turns with ours. All processes compute in one thread.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from engine import HERE, NUM_WARMUP_STEPS, exit_on_sigterm, single_threaded_environment
from evenstep.plan.steps import StepCosts, predict_step
from evenstep.plan.topology import Device, Link, LinkKind, Machine, Topology
from evenstep.testing.network import Namespaces, descendants, missing
from models import TASKS
from results import AGAINST_PEERS, Record, add_option, shown

PORT = 7777
LINKS = {"unshaped": None, "10 Gbit/s": "10gbit", "1 Gbit/s": "1gbit"}
MODELS = ("mlp", "resnet", "transformer")
NUMBERS_OF_SHARDS = (2, 8)
SHARDS = 8
PARTS = ("steps", "predicted", "loss", "newcomer")
GIGABIT_BYTES_PER_S = 0.94e9 / 8  # without the heads of packets
STATE_BYTES = 100_000_000
PATIENCE_S = 120.0


class Failed(Exception):
    """A measured process failed or took too long; the message has what it said."""


@dataclass(frozen=True)
class Steps:
    """How long a step takes, and how much a machine sends for it."""

    seconds: float
    sent_bytes: float


def main() -> int:
    """Measure everything; 1 if something failed."""
    parser = argparse.ArgumentParser(description="Measure runs over two machines, which are namespaces of this one.")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of every training on every link")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, separated by commas")
    parser.add_argument("--models", default=",".join(MODELS), help="of the steps; which, separated by commas")
    parser.add_argument("--links", default=",".join(LINKS), help="of the steps; which, separated by commas")
    parser.add_argument("--train", type=int, metavar="BYTES", help="be a training with so much state (internal)")
    add_option(parser)
    options = parser.parse_args()
    parts, models, links = (
        chosen(parser, name, getattr(options, name), known)
        for name, known in (("parts", PARTS), ("models", MODELS), ("links", LINKS))
    )
    if options.train is not None:
        train(options.train)
        return 0
    if (why := missing()) is not None:
        print(f"no figures of several machines: {why}")
        return 0
    exit_on_sigterm()
    record = Record.begin()
    if "steps" in parts:
        columns = ["link", "what", "ours ms", "peer ms", "ratio", "goal", "sent MB a step", "DDP"]
        rows = shown(step_rows(models, links, options.rounds))
        record.table(columns, rows, "Steps on two machines, against DDP", **{**AGAINST_PEERS, "labels": columns[:2]})
    if "predicted" in parts:
        columns = ["MLP at 1 Gbit/s", "predicted ms", "measured ms", "ratio"]
        record.table(columns, shown(predicted_rows()), "As `evenstep topo --simulate` predicts it (goal: 0.75 to 1.25)")
    if "loss" in parts:
        columns = ["what happens", "times", "median s", "worst s"]
        record.table(columns, shown(loss_rows()), "Until the next committed step")
    if "newcomer" in parts:
        record.table(["what", "s"], shown(newcomer_rows()), f"A newcomer and a state of {STATE_BYTES / 1e6:.0f} MB")
    record.save(options.json)
    return 0


def chosen(parser: argparse.ArgumentParser, option: str, text: str, known: Iterable[str]) -> list[str]:
    """What an option names, separated by commas; ends the process with a sentence if there is no such thing."""
    names = text.split(",")
    for name in names:
        if name not in known:
            parser.error(f"--{option}: no '{name}'; choose among {', '.join(known)}")
    return names


# ---- steps ----


def step_rows(models: list[str], links: list[str], rounds: int) -> Iterator[list[str]]:
    """A row for every link, model and number of shards; DDP, which has no shards, trains once between ours."""
    for link in links:
        for model in models:
            ddp: list[Steps] = []
            ours: dict[int, list[Steps]] = {shards: [] for shards in NUMBERS_OF_SHARDS}
            for _ in range(rounds):
                few, many = NUMBERS_OF_SHARDS
                ours[few].append(ours_once(model, few, link))
                ddp.append(ddp_once(model, link))
                ours[many].append(ours_once(model, many, link))
            for shards, mine in ours.items():
                yield step_row(link, f"{model}, {shards} shards", mine, ddp)


def step_row(link: str, what: str, ours: list[Steps], ddp: list[Steps]) -> list[str]:
    """One training against DDP."""
    mine, theirs = (statistics.median(each.seconds for each in side) for side in (ours, ddp))
    return [
        link,
        what,
        f"{1000 * mine:.1f}",
        f"{1000 * theirs:.1f}",
        f"{mine / theirs:.2f}",
        "0.8" if LINKS[link] is None else "1.0",
        *(f"{max(each.sent_bytes for each in side) / 1e6:.1f}" for side in (ours, ddp)),
    ]


def ours_once(model: str, shards: int, link: str, machines: int = 2) -> Steps:
    """Train over some machines, with a worker on each."""

    def commands(network: Namespaces, folder: Path, out: Path) -> list[list[str]]:
        where, token = f"{network.addresses[0]}:{PORT}", str(folder / "token")
        Path(token).write_text("benchmark")
        head = [
            "run",
            "--listen",
            where,
            "--machines",
            str(machines),
            "--token-file",
            token,
            "-n",
            "1",
            "--silence",
            "30",
        ]
        trained = ["--model", model, "--shards", str(shards), "--steps", str(TASKS[model].steps), "--out", str(out)]
        evenstep = [sys.executable, "-m", "evenstep"]
        join = [*evenstep, "join", where, "--token-file", token, "-n", "1"]
        return [[*evenstep, *head, str(HERE / "train_ours.py"), *trained], *[join] * (machines - 1)]

    return measure(commands, link, TASKS[model].steps, machines)


def ddp_once(model: str, link: str) -> Steps:
    """Train with DDP over gloo, with a rank on each of two machines."""

    def commands(_: Namespaces, __: Path, out: Path) -> list[list[str]]:
        trained = ["--model", model, "--steps", str(TASKS[model].steps), "--out", str(out)]
        return [[sys.executable, str(HERE / "engine.py"), "--peer", "ddp", *trained]] * 2

    return measure(commands, link, TASKS[model].steps, 2)


def measure(
    commands: Callable[[Namespaces, Path, Path], list[list[str]]], link: str, steps: int, machines: int
) -> Steps:
    """Run a command on each machine; the first writes the times of its steps into a file."""
    with tempfile.TemporaryDirectory() as folder, Namespaces(machines) as network:
        rate, out = LINKS[link], Path(folder, "times.json")
        if rate is not None:
            network.limit(rate)
        group = {"MASTER_ADDR": network.addresses[0], "MASTER_PORT": "29500", "WORLD_SIZE": str(machines)}
        cores = sorted(os.sched_getaffinity(0))
        logs = [Path(folder, f"{machine}.log") for machine in range(machines)]
        started = []
        for machine, command in enumerate(commands(network, Path(folder), out)):
            variables = single_threaded_environment(**group, RANK=str(machine), GLOO_SOCKET_IFNAME="eth0")
            with logs[machine].open("w") as log:
                pinned = ["taskset", "--cpu-list", str(cores[machine % len(cores)]), *command]
                started.append(network.start(machine, *pinned, env=variables, stdout=log, stderr=log))
        deadline = time.monotonic() + PATIENCE_S
        while (codes := [process.poll() for process in started]) != [0] * machines:
            if any(codes) or time.monotonic() > deadline:
                said = (f"machine {machine} ({codes[machine]}): {log.read_text()}" for machine, log in enumerate(logs))
                raise Failed("\n".join(said))
            time.sleep(0.05)
        sent = max(network.sent_bytes(machine) for machine in range(machines))
        return Steps(statistics.median(json.loads(out.read_text())), sent / (steps + NUM_WARMUP_STEPS))


# ---- what is predicted ----


def predicted_rows() -> Iterator[list[str]]:
    """Constants of one and two machines, what they predict for more, and what two and four take.

    Machines share the cores of this one, so that four of them on two cores compute half as fast.
    """
    link, cores = "1 Gbit/s", len(os.sched_getaffinity(0))
    shard_s = ours_once("mlp", SHARDS, link, 1).seconds / SHARDS
    alone, together = (ours_once("tiny", SHARDS, "unshaped", machines).seconds for machines in (1, 2))
    meetings = StepCosts(shard_s).num_meetings
    costs = StepCosts(shard_s, meetings, max(together - alone, 0.0) / meetings)
    num_bytes = 4 * sum(p.numel() for p in TASKS["mlp"].model().parameters())
    network = Link(LinkKind.NETWORK, GIGABIT_BYTES_PER_S, 1e-4)
    for count in (2, 4, 1000):
        speed = min(cores / count, 1.0) if count <= SHARDS else 1.0
        machines = tuple(Machine(f"m{i}", (Device("core", speed=speed),)) for i in range(count))
        found = predict_step(Topology(machines, (network,)), max(SHARDS, count), num_bytes, costs).seconds
        took = ours_once("mlp", SHARDS, link, count).seconds if count <= SHARDS else None
        cells = ["-", "-"] if took is None else [f"{1000 * took:.0f}", f"{found / took:.2f}"]
        yield [f"{count} machines", f"{1000 * found:.0f}", *cells]


# ---- machines that go and come ----


def train(state_bytes: int) -> None:
    """Train until nobody wants it any more; say when each step was committed, by how many workers."""
    import torch

    import evenstep

    width = 500
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(max(state_bytes // (4 * width * width), 1))]
    data = torch.utils.data.TensorDataset(torch.randn(16 * 100_000, 1).expand(-1, width))
    with evenstep.Run(shards=8, seed=0, progress=False, threads=1) as run:
        model: torch.nn.Module = torch.nn.Sequential(*layers)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
        for batch in run.batches(data, batch_size=16):
            run.step(batch, lambda part: model(part[0]).square().mean())
            run.print("step", run.version, "workers", run.num_workers, "at", time.time())


class Running:
    """A head that trains, and what it has said. A context manager."""

    def __init__(self, network: Namespaces, folder: Path, state_bytes: int) -> None:
        self._network, self._log, self._token = network, folder / "head.log", folder / "token"
        self._token.write_text("benchmark")
        self._where = f"{network.addresses[0]}:{PORT}"
        with self._log.open("w") as log:
            options = ["--listen", self._where, "--token-file", str(self._token), "-n", "1"]
            script = [str(Path(__file__)), "--train", str(state_bytes)]
            self._head = network.evenstep(0, "run", *options, *script, stdout=log, stderr=log)
        self.steps(1)

    def join(self) -> "subprocess.Popen[str]":
        """Let the other machine join, and wait until it takes part."""
        known = len(self.steps(2))
        other = self._network.evenstep(
            1, "join", self._where, "--token-file", str(self._token), "-n", "1", stdout=subprocess.DEVNULL
        )
        self.steps(2, known + 3, other)
        return other

    def steps(self, num_workers: int, count: int = 0, other: "subprocess.Popen[str] | None" = None) -> list[float]:
        """When steps of this many workers were committed, once there are enough of them."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            said = self._log.read_text()
            found = [
                float(when) for when in re.findall(rf"^step \d+ workers {num_workers} at (.*)$", said, re.MULTILINE)
            ]
            if len(found) >= count:
                return found
            if other is not None and other.poll() is not None:
                raise Failed(other.communicate()[1])
            if time.monotonic() > deadline or self._head.poll() is not None:
                raise Failed(said[-2000:])
            time.sleep(0.005)

    @property
    def said(self) -> str:
        """What the head has said so far."""
        return self._log.read_text()


def kill(process: "subprocess.Popen[str]") -> None:
    """End a machine: all of its processes at once."""
    for pid in descendants(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def loss_rows() -> Iterator[list[str]]:
    """From the moment at which a machine is lost to the next step that is committed without it."""
    with tempfile.TemporaryDirectory() as folder, Namespaces(2) as network:
        running = Running(network, Path(folder), 1_000_000)
        for what, times in (("its power goes", 5), ("its link is cut (2 s of silence)", 2)):
            found = []
            for _ in range(times):
                other = running.join()
                begin, known = time.time(), len(running.steps(1))
                if what.startswith("its power"):
                    kill(other)
                else:
                    network.cut(1)
                found.append(running.steps(1, known + 1)[known] - begin)
                if other.poll() is None:
                    kill(other)
                network.mend(1)
            yield [what, str(times), f"{statistics.median(found):.2f}", f"{max(found):.2f}"]


def newcomer_rows() -> Iterator[list[str]]:
    """How long a newcomer takes to come, and how long the others wait for it."""
    with tempfile.TemporaryDirectory() as folder, Namespaces(2) as network:
        running = Running(network, Path(folder), STATE_BYTES)
        running.steps(1, 5)
        begin = time.time()
        running.join()
        alone, together = running.steps(1), running.steps(2)
        usual = statistics.median(b - a for a, b in pairwise(alone))
        yield ["from `evenstep join` to its first step, importing torch included", f"{together[0] - begin:.2f}"]
        yield ["the others waited, beyond a step", f"{max(together[0] - alone[-1] - usual, 0.0):.2f}"]


if __name__ == "__main__":
    sys.exit(main())
