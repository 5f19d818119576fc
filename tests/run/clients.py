"""A parameter server that is a few lines of Python, and the clients of it, for tests of what a run says to servers."""

from dataclasses import dataclass, field
from typing import Any

import torch

from evenstep.core.errors import RefusedError


@dataclass
class FakeServer:
    """Plain gradient descent on whatever comes, alone or from so many workers at once; keeps what it was told."""

    staleness: int | None = 0
    rate: float = 0.5
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    version: int = 0
    told: list[dict[str, Any]] = field(default_factory=list)
    done: dict[str, tuple[int, Any]] = field(default_factory=dict)
    open: int = 0

    def connect(self, worker, timeout_s):
        return FakeClient(self, worker)

    @property
    def last(self):
        return self.told[-1]


class FakeClient:
    """The verbs of `Client` that runs use."""

    def __init__(self, server, worker):
        self.server, self.worker, self.staleness = server, worker, server.staleness
        self.version, self.sequence = server.version, server.done.get(worker, (0, None))[0]
        server.open += 1

    def status(self):
        return {"owner": "somebody" if self.server.values else None}

    def put_parameters(self, parameters, *, force=False, buffers=(), sequence=None):
        if self.server.values and not force:
            raise RefusedError("there are some")
        self.server.values = {name: t.detach().clone() for name, t in parameters.items()}
        self.server.version += 1
        self.server.told.append({"put": sorted(parameters), "buffers": list(buffers), "sequence": sequence})
        self.version = self.server.version
        return self.version

    def get_parameters(self, names=None, *, min_version=0, timeout_s=None):
        assert self.server.version >= min_version, "nobody will make it"
        self.version = self.server.version
        return {n: self.server.values[n].clone() for n in (self.server.values if names is None else names)}

    def update(self, update, *, kind="gradient", timeout_s=None, sequence=None, note=None, buffers=(), **more):
        self.sequence = self.sequence + 1 if sequence is None else sequence
        number, reply = self.server.done.get(self.worker, (0, None))
        if self.sequence == number:
            return reply
        self.server.told.append({
            "worker": self.worker, "kind": kind, "sequence": self.sequence, "note": note, "buffers": list(buffers),
            "update": {name: t.detach().clone() for name, t in update.items()}, **more,
        })  # fmt: skip
        for name, tensor in update.items():
            bare = name.rpartition("/")[2]
            if bare in buffers:
                self.server.values[bare] = tensor.detach().clone()
            else:
                self.server.values[bare].sub_(tensor if kind == "delta" else self.server.rate * tensor)
        self.server.version += 1
        reply = {"version": self.server.version, "notes": [note]}
        self.server.done[self.worker] = self.sequence, reply
        return reply

    def update_parameters(self, update, **more):
        return self.update(update, **more)["version"]

    def last_update(self):
        return self.server.done[self.worker][1]

    def close(self):
        self.server.open -= 1
