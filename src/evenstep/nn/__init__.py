"""Synchronized batch norm for shards, replicas and process groups, conversion to and from it; layers in parts."""

from evenstep.nn.batchnorm import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d
from evenstep.nn.convert import convert_sync_batchnorm, patch_batchnorm, revert_sync_batchnorm
from evenstep.nn.data_parallel import DataParallel, ReplicationContext, add_replication_callbacks
from evenstep.nn.features.layer import Partitioned
from evenstep.nn.features.marks import partition

__all__ = [
    "DataParallel",
    "Partitioned",
    "ReplicationContext",
    "SyncBatchNorm",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "add_replication_callbacks",
    "convert_sync_batchnorm",
    "partition",
    "patch_batchnorm",
    "revert_sync_batchnorm",
]
