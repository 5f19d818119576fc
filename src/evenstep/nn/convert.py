"""Conversion between torch's batch norm and the synchronized one."""

from typing import TypeVar

from torch import nn

from evenstep.nn.batchnorm import SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d

M = TypeVar("M", bound=nn.Module)
_KINDS = {nn.BatchNorm1d: SyncBatchNorm1d, nn.BatchNorm2d: SyncBatchNorm2d, nn.BatchNorm3d: SyncBatchNorm3d}


def convert_sync_batchnorm(module: M) -> M:
    for name, m in module.named_modules():
        if type(m) in _KINDS:
            m.__class__ = _KINDS[type(m)]
            m.process_group = None
            m.eps_mode = "plus"
            m.qualified_name = name
    return module
