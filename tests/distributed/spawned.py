"""What the ranks of a job do that other processes start: importable without anything of ours."""

import os
import sys
import threading
from pathlib import Path

__all__ = ["import_and_look", "sum_many_times"]


def import_and_look() -> None:
    """See that importing registers the backend and does nothing else."""
    import torch

    before = (set(os.listdir("/proc/self/fd")), threading.active_count(), dict(os.environ))
    import evenstep.distributed

    assert (set(os.listdir("/proc/self/fd")), threading.active_count(), dict(os.environ)) == before
    assert evenstep.distributed.__name__ in sys.modules
    assert "evenstep" in torch.distributed.Backend.backend_list
    assert not torch.distributed.is_initialized()


def sum_many_times(rank: int, port: int, folder: Path) -> None:
    """Be a rank; leave a file named after the process, which says whether ours was imported here."""
    is_fresh = "evenstep" not in sys.modules
    if is_fresh:
        import_and_look()
    import torch
    from torch import distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("evenstep")
    assert dist.get_backend() == "evenstep"
    for _ in range(200):
        mine = torch.ones(3000)
        dist.all_reduce(mine)
    assert mine.sum() == 6000
    dist.destroy_process_group()
    (folder / str(os.getpid())).write_text("fresh" if is_fresh else "forked")
