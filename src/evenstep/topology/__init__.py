"""How machines are connected: the value itself, and how to read it from this machine, a text or a file.

    from evenstep.topology import lay, read_file, read_machine

    topology = read_file(Path("machines.json"))
    layout = lay(topology, num_shards=64)

The value and all decisions about it are in `evenstep.plan`; this package reads it. Measuring links
(`evenstep.topology.measure`) needs torch and is not imported with the rest.
"""

from evenstep.plan.layout import Layout
from evenstep.plan.pairing import pair_devices
from evenstep.plan.planner import compare, lay
from evenstep.plan.topology import Device, Link, LinkKind, Machine, Topology
from evenstep.topology.file import from_json, from_text, read_file, to_json
from evenstep.topology.machine import read_cores, read_machine
from evenstep.topology.smi import from_smi

__all__ = [
    "Device",
    "Layout",
    "Link",
    "LinkKind",
    "Machine",
    "Topology",
    "compare",
    "from_json",
    "from_smi",
    "from_text",
    "lay",
    "pair_devices",
    "read_cores",
    "read_file",
    "read_machine",
    "to_json",
]
