"""Two machines on yours: a run over both, one of them is cut off in the middle, and the result is that of one.

Network namespaces stand for the machines, so it needs root and Linux:

    sudo .venv/bin/python examples/two_machines.py
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from evenstep.testing.network import Namespaces, missing

SCRIPT = """
import time, torch, evenstep
from torch import nn

with evenstep.Run(seed=1, progress=False) as run:
    x = torch.randn(640, 8)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    model, _ = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))

    def loss(part):
        time.sleep(0.01)
        return nn.functional.mse_loss(model(part[0]), part[1])

    for batch in run.batches(data, batch_size=16):
        error = run.step(batch, loss)
        if run.version % 10 == 0:
            run.print(f"step {run.version}, loss {float(error):.4f}, {run.num_workers} workers")
"""


def main() -> int:
    """Show it; returns whether the fingerprints are the same."""
    if (why := missing()) is not None:
        print(f"this needs machines: {why}")
        return 1
    with tempfile.TemporaryDirectory() as folder, Namespaces(2) as network:
        script, token, where = Path(folder, "train.py"), Path(folder, "token"), f"{network.addresses[0]}:7777"
        script.write_text(SCRIPT)
        token.write_text("only they know")
        alone = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
        options = ("--listen", where, "--machines", "2", "--token-file", token, "-n", "2")
        head = network.evenstep(0, "run", *options, script, stderr=subprocess.STDOUT)
        network.evenstep(1, "join", where, "--token-file", token, "-n", "2", stdout=None, stderr=None)
        assert head.stdout is not None, "it is read here"
        last = ""
        for line in head.stdout:
            last = line
            print(f"head: {line}", end="", flush=True)
            if line.startswith("step 10,"):
                print("     (the link of machine 1 is cut)")
                network.cut(1)
                time.sleep(0.1)
        print(f"alone: {alone.splitlines()[-1]}")
        same = alone.splitlines()[-1] == last.strip()
        print("the same" if same else "NOT the same")
        return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
