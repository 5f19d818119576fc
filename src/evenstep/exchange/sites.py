"""How the sites of one machine come to read each other's memory."""

from collections.abc import Sequence

import torch

from evenstep.core.errors import EvenstepError
from evenstep.exchange.group import Group
from evenstep.transport.windows import HostWindows, PeerWindows, Windows

__all__ = ["open_windows"]


def open_windows(group: Group, device: torch.device, num_slots: Sequence[int], slot_bytes: int, what: str) -> Windows:
    """Windows in each other's memory where all GPUs can have them, else in the segment. All workers must call it alike.

    Args:
        group: The workers: each is a site.
        device: Where this one's memory is.
        num_slots: How many slots each has.
        slot_bytes: The size of a slot.
        what: What they are for, in words.
    """
    if device.type == "cuda":
        windows = None
        try:
            windows = PeerWindows(
                device, group.rank, num_slots, slot_bytes, lambda handle: group.gather_json(f"{what}: windows", handle)
            )
        except EvenstepError as error:
            if type(error) is not EvenstepError:  # a peer's, not the driver's
                raise
        if all(group.gather_json(f"{what}: windows are open", windows is not None)) and windows is not None:
            return windows
        if windows is not None:
            windows.close()
    return HostWindows(group.segment.memory, device, group.rank, num_slots, slot_bytes)
