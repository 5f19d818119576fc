"""Lightning, transformers and Accelerate on the backend, as docs/distributed.md says: the bits that gloo ends on."""

import importlib.util
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

import processes
from workers import run_outcomes

NUM_RANKS = 2
PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def script(word: str) -> str:
    """The script of the page that has this word in it."""
    found = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if word in block]
    assert len(found) == 1, f"{len(found)} scripts of {PAGE} say {word!r}"
    return found[0]


def as_torchrun_would(body: Callable[[int], Any]) -> list[Any]:
    """Run something on ranks that have torchrun's variables."""
    port = processes.free_port()

    def rank_body(rank: int) -> Any:
        warnings.simplefilter("ignore")  # theirs, about names and settings of torch
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(NUM_RANKS))
        os.environ.update(LOCAL_WORLD_SIZE=str(NUM_RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(TORCHELASTIC_RUN_ID="none", TORCHELASTIC_MAX_RESTARTS="0", TORCHELASTIC_RESTART_COUNT="0")
        return body(rank)

    outcomes = run_outcomes(NUM_RANKS, rank_body)
    assert [outcome.kind for outcome in outcomes] == [None] * NUM_RANKS, outcomes
    return [outcome.value for outcome in outcomes]


NAMES: dict[str, Any] = {"__name__": "__main__"}  # of the script; kept until the process ends, as those of any script


def run_script(text: str, folder: Path) -> tuple[str, int, dict[str, bytes]]:
    """Run one of the page's scripts; on which backend, in how many steps, and to which model it trained."""
    steps: list[object] = []
    register_optimizer_step_post_hook(lambda *step: steps.append(step))
    os.chdir(folder)
    exec(compile(text, str(PAGE), "exec"), NAMES)
    model = {name: each.numpy().tobytes() for name, each in NAMES["model"].state_dict().items()}
    return dist.get_backend(), len(steps), model


@pytest.mark.parametrize("package", ["lightning", "transformers", "accelerate"])
def test_the_script_of_the_page_ends_where_it_ends_with_gloo(package, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # importing Lightning sets it
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    ours = script(f"import {package}" if package == "lightning" else f"from {package} import")
    assert '"evenstep"' in ours
    theirs = ours.replace('"evenstep"', '"gloo"')
    with warnings.catch_warnings(action="ignore"):  # once, and not in every rank
        exec("\n".join(line for line in ours.splitlines() if line.startswith(("import ", "from "))), {})
    found = {}
    for backend, text in {"evenstep": ours, "gloo": theirs}.items():
        (tmp_path / backend).mkdir()
        first, second = as_torchrun_would(lambda _, text=text, backend=backend: run_script(text, tmp_path / backend))
        assert first == second, "both ranks have one model"
        assert first[0] == backend
        found[backend] = first[1:]
    assert found["evenstep"] == found["gloo"]
    assert found["gloo"][0] >= 4, "it was trained"
