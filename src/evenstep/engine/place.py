"""Where a worker computes, in words: for finding a machine that computes wrong."""

import os
import socket

import torch

from evenstep.core.identity import last_core

__all__ = ["place_of"]


def place_of(device: torch.device) -> str:
    """Machine, process, and core or GPU."""
    cuda = device.type == "cuda"
    where = f"GPU {torch.cuda.get_device_properties(device).uuid}" if cuda else f"core {last_core()}"
    return f"machine {socket.gethostname()}, process {os.getpid()}, {where}"
