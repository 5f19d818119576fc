"""A worker in words."""

from evenstep.core.children import fork
from evenstep.launch.worker_process import WorkerProcess


def test_a_worker_is_described_by_its_number_and_process_and_how_it_ended():
    worker = WorkerProcess(3, fork(lambda: 5))
    worker.child.reap()
    assert worker.describe() == f"worker 3 (pid {worker.child.pid})"
    assert worker.describe_end() == f"worker 3 (pid {worker.child.pid}) ended with exit code 5"
