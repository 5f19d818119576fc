"""The settings that exactness depends on in this process: set when a run begins, checked at every step, restored."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from evenstep.arithmetic.portable import Portable
from evenstep.arithmetic.processor import read_processor
from evenstep.core import env
from evenstep.core.config import RunConfig
from evenstep.core.errors import ConfigError, NondeterminismError

__all__ = ["Determinism", "device_of", "profile"]


def profile(config: RunConfig) -> dict[str, Any]:
    """What must be the same on all workers for their bits to agree."""
    cuda = config.device.startswith("cuda")
    portable = config.arithmetic == "portable"
    here = {**env.kernel_choices(), "processor": f"{read_processor().kind}, {torch.backends.cpu.get_cpu_capability()}"}
    return {
        "shards": config.shards,
        "seed": config.seed,
        "threads": config.threads,
        "device": torch.cuda.get_device_name(config.device) if cuda else "cpu",
        "torch": torch.__version__,
        "arithmetic": config.arithmetic,
        **({} if portable else here),
    }


def device_of(device: str, worker: int, num_workers: int) -> str:
    """The device of a worker: plain "cuda" is GPU `worker` modulo their number.

    Warns if workers would take turns on a GPU.

    Raises:
        ConfigError: There is no such device.
    """
    try:
        where = torch.device(device)
    except RuntimeError:
        where = torch.device("meta")
    if where.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}, expected 'cpu', 'cuda' or 'cuda:N'")
    if where.type == "cpu":
        return "cpu"
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or not count:
        raise ConfigError(
            f"device={device!r} but torch sees no CUDA device; use device='cpu', or a CUDA build of torch"
        )
    if where.index is not None and where.index >= count:
        raise ConfigError(f"device={device!r} but torch sees {count} CUDA devices, from cuda:0 to cuda:{count - 1}")
    sharing = num_workers if where.index is not None else -(-num_workers // count)
    if sharing > 1 and not (env.mps_directory() / "control").exists():
        warnings.warn(
            f"{sharing} workers share one GPU and take turns on it, which is slow; first start NVIDIA's service for "
            f"that (nvidia-cuda-mps-control -d), or use evenstep run -n {1 if where.index is not None else count}",
            stacklevel=3,
        )
    return f"cuda:{worker % count if where.index is None else where.index}"


@dataclass
class Determinism:
    """Pins threads and deterministic kernels for one run."""

    config: RunConfig

    def __post_init__(self) -> None:
        self._before = (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]  # a module property
            torch.backends.cudnn.benchmark,
        )
        self._device = torch.cuda.current_device() if self.config.device.startswith("cuda") else None
        self._portable: Portable | None = None
        self._said = False
        try:
            self._pin()
        except BaseException:
            self.restore()
            raise

    def _pin(self) -> None:
        if self._device is not None:
            env.write({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})  # cuBLAS sums in a fixed order only with this
            torch.cuda.set_device(self.config.device)  # seeding applies to the current device's generator
        self._portable = Portable(self.config.on_nondeterminism) if self.config.arithmetic == "portable" else None
        torch.set_num_threads(self.config.threads)
        torch.use_deterministic_algorithms(True, warn_only=self.config.on_nondeterminism == "warn")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a pass over every new tensor
        torch.backends.cudnn.benchmark = False

    def check(self) -> None:
        """Report it if user code changed what the bits depend on.

        Raises:
            NondeterminismError: Something was changed, and the run was not told only to warn.
        """
        if self._portable is not None:
            self._portable.check()
        found = {
            "torch.get_num_threads()": (torch.get_num_threads(), self.config.threads),
            "torch.are_deterministic_algorithms_enabled()": (torch.are_deterministic_algorithms_enabled(), True),
            "torch.backends.cudnn.benchmark": (torch.backends.cudnn.benchmark, False),
        }
        for what, (now, pinned) in found.items():
            if now != pinned:
                self._say(
                    f"{what} is {now} but the run began with {pinned}: the bits of a step depend on it; "
                    "leave it alone, or set Run(threads=...) or Run(on_nondeterminism='warn')"
                )

    def _say(self, message: str) -> None:
        if self.config.on_nondeterminism == "error":
            raise NondeterminismError(message)
        if not self._said:
            warnings.warn(message, stacklevel=4)
        self._said = True

    def restore(self) -> None:
        """Restore the settings of the process."""
        threads, enabled, warn_only, fill, benchmark = self._before
        if self._portable is not None:
            self._portable.close()
        if self._device is not None:
            torch.cuda.set_device(self._device)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]  # a module property
        torch.backends.cudnn.benchmark = benchmark
