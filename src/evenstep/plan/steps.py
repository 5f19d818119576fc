"""How long a step of a run over many machines takes, from constants measured on a few.

A step computes its shards, sends gradients meanwhile, and meets a few times. Every machine sends each piece of its sums
to the piece's home, and the sums of its own pieces to all: 2 (M - 1) / M of the gradients, some of it while the
backward of its last shard runs. In a meeting every machine sends a message to every other one.
"""

from dataclasses import dataclass

from evenstep.core.errors import ConfigError
from evenstep.plan.topology import LinkKind, Topology

__all__ = ["StepCosts", "StepPrediction", "predict_step"]

_BACKWARD = 2 / 3  # of the time of a shard, usually: it has twice as many products as forward
MESSAGE_BYTES = 4096


@dataclass(frozen=True)
class StepCosts:
    """What was measured.

    Attributes:
        shard_s: How long forward and backward of a shard take on a device of speed 1.
        num_meetings: How often all workers meet in a step; a batch norm is two more.
        message_s: How long a machine is busy with a message to another one.
    """

    shard_s: float
    num_meetings: int = 2
    message_s: float = 1e-4


@dataclass(frozen=True)
class StepPrediction:
    """What a step is predicted to take.

    Attributes:
        compute_s: Until the slowest device has computed its shards.
        gradients_s: What the gradients need beyond that.
        meetings_s: What the meetings need.
    """

    compute_s: float
    gradients_s: float
    meetings_s: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute_s + self.gradients_s + self.meetings_s


def predict_step(topology: Topology, num_shards: int, num_bytes: float, costs: StepCosts) -> StepPrediction:
    """Predict a step on all devices of a topology, with shards shared out by speed.

    Args:
        topology: The machines.
        num_shards: K.
        num_bytes: The size of the gradients.
        costs: What was measured.

    Raises:
        ConfigError: There are fewer shards than devices.
    """
    if num_shards < (count := topology.num_devices):
        raise ConfigError(
            f"{count} devices but {num_shards} shards: every device needs one; use at least as many shards"
        )
    speeds = [device.speed for machine in topology.machines for device in machine.devices]
    compute_s = costs.shard_s * max(num_shards / sum(speeds), 1 / max(speeds))
    machines = [machine for machine in topology.machines if machine.devices]
    if len(machines) == 1:
        return StepPrediction(compute_s, 0.0, 0.0)
    others, several_racks = len(machines) - 1, len({machine.rack for machine in machines}) > 1
    link = topology.usual(LinkKind.SPINE if several_racks else LinkKind.NETWORK)
    card = topology.usual(LinkKind.NETWORK)
    transfer_s = 2 * others / len(machines) * num_bytes / card.bandwidth_bytes_per_s
    if several_racks:
        racks = [sum(m.rack == rack for m in machines) for rack in {machine.rack for machine in machines}]
        crossing = max(2 * count * (len(machines) - count) / len(machines) for count in racks) * num_bytes
        transfer_s = max(transfer_s, crossing / link.bandwidth_bytes_per_s)
    backward_s = _BACKWARD * costs.shard_s / max(speeds)  # gradients become complete during the last shard's
    gradients_s = max(transfer_s - backward_s, 0.0) + 2 * link.latency_s
    busy_s = max(costs.message_s, MESSAGE_BYTES / card.bandwidth_bytes_per_s)
    return StepPrediction(compute_s, gradients_s, costs.num_meetings * (link.latency_s + others * busy_s))
