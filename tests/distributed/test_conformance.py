"""A part of torch's own tests of a backend; `make conformance` runs all of them, beside gloo."""

import importlib.util

import pytest
from conformance import outcomes

NAMES = [
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_all_gather_coalesced_complex",
    "test_all_reduce_sum_async",
    "test_batch_isend_irecv_gloo_tags",
    "test_barrier_timeout_full_group",
    "test_get_backend",
    "test_isend_autograd_profiler",
    "test_monitored_barrier_gloo",
    "test_scatter_full_group",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
]


@pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="torch's tests want expecttest")
def test_a_part_of_torchs_own_tests_passes():
    assert outcomes("evenstep", NAMES, timeout_s=110) == dict.fromkeys(NAMES, "passed")
