"""Synchronized batch norm for shards, replicas and process groups, and conversion to and from it."""

from evenstep.nn.batchnorm import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d
from evenstep.nn.convert import convert_sync_batchnorm, patch_batchnorm, revert_sync_batchnorm
from evenstep.nn.data_parallel import DataParallel, ReplicationContext, add_replication_callbacks

__all__ = [
    "DataParallel",
    "ReplicationContext",
    "SyncBatchNorm",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "add_replication_callbacks",
    "convert_sync_batchnorm",
    "patch_batchnorm",
    "revert_sync_batchnorm",
]
