"""A `torch.distributed` backend for the processes of one machine: collectives over shared memory, in microseconds.

    import evenstep.distributed
    torch.distributed.init_process_group("evenstep")

Importing this registers the backend and does nothing else. Ranks on several machines work too: shared memory inside a
machine, gloo between one rank of each.
"""

from torch import distributed

from evenstep.distributed.process_group import EvenstepProcessGroup, create_process_group, monitored_barrier

__all__ = ["EvenstepProcessGroup", "monitored_barrier"]

if "EVENSTEP" not in distributed.Backend._plugins:
    distributed.Backend.register_backend("evenstep", create_process_group, extended_api=True, devices=["cpu"])
