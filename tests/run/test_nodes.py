"""torchrun over several machines: the same result."""

import re
import sys

from namespaces import Namespaces, finish, needs_root
from workers import cli_run

SCRIPT = """
    import torch
    from torch import nn
    import torch.nn.functional as F
    import evenstep

    with evenstep.Run(shards=8, seed=3, timeout_s=30.0) as run:
        data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
        model = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))
        model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
        for batch in run.batches(data, batch_size=16, epochs=2):
            run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
"""


@needs_root
def test_torchrun_on_two_machines_ends_on_the_fingerprint_of_one_process(script):
    path = script(SCRIPT)
    alone = cli_run("run", "-n", "1", path).stdout.splitlines()[-1]
    assert re.fullmatch("fingerprint [0-9a-f]{64}", alone)
    with Namespaces(2) as network:
        where = ["--master-addr", network.addresses[0], "--master-port", 29500]
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, *where]
        started = [network.start(m, *command, "--node-rank", m, path, apart=True) for m in range(2)]
        first, second = finish(started, 90)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert first[1].splitlines()[-1] == alone
