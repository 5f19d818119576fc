"""The test kit for a crew in one process: machines and a console that only remember what they were asked for."""

from evenstep.launch.crew import RunCrew
from evenstep.launch.job import Job
from evenstep.launch.machine import End
from evenstep.launch.roster import Script
from evenstep.page.seen import Seen

__all__ = ["FakeConsole", "FakeMachines", "crew_of", "killed"]


class FakeConsole:
    """Keeps every call as its name and arguments; what was said as sentences."""

    def __init__(self):
        self.calls = []
        self.sentences = []

    def say(self, sentence, *, secret=False):
        self.sentences.append(sentence)

    def __getattr__(self, name):
        return lambda *args, **options: self.calls.append((name, *args, *options.values()))


class FakeMachines:
    """One machine with all places, which is its own `here`."""

    def __init__(self, job):
        self.number, self.here, self.all = 0, self, {0: self}
        self.places = list(range(job.num_workers))
        self.are_enough, self.calls = True, []

    def of(self, place):
        return self

    def places_of(self, machine):
        return self.places

    def __getattr__(self, name):
        return lambda *args, **options: self.calls.append((name, *args, *options.values()))

    def took(self, *names):
        """The calls of these names since this was asked last."""
        found, self.calls = [call for call in self.calls if call[0] in names], []
        return found


def crew_of(num_workers, *, stepping=True, **options):
    """A crew whose workers have all come, and are in a first generation if `stepping`."""
    job = Job("train.py", (), num_workers, **options)
    machines, console, seen = FakeMachines(job), FakeConsole(), Seen()
    crew = RunCrew(job, console, machines, seen)
    crew.begin()
    if stepping:
        for place in range(num_workers):
            crew.roster = crew.roster.speaks(place, Script.INSIDE)
            crew.turn(crew.roster.waits(place))
        machines.calls.clear()
    return crew, machines, console, seen


def killed(place, step=3):
    """The end of a worker that was killed."""
    return End(-9, f"worker {place} (pid 1) was killed by SIGKILL", None, False, step)
