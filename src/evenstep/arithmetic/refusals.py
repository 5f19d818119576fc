"""Operations that cannot be made equal: refused or warned about by name while a portable run is open."""

import re
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch.library import Library

from evenstep.core.errors import NondeterminismError

__all__ = ["REFUSED", "Refusals"]

REFUSED = {"linalg_lstsq": "its result changes from call to call; use torch.linalg.solve or torch.linalg.qr"}
"""Operations of torch, and why each is refused."""

_HOME = str(Path(torch.__file__).parent)


class Refusals:
    """Replaces operations until it is closed.

    Args:
        on_nondeterminism: Whether a refused operation raises, or only warns and is computed anyway.
    """

    def __init__(self, on_nondeterminism: Literal["error", "warn"]) -> None:
        self._strict = on_nondeterminism == "error"
        self._libraries: dict[str, Library] = {}
        self._said: set[str] = set()
        self._graphs = _num_compiled_graphs()
        for name, why in REFUSED.items():
            self._replace(f"aten::{name}", f"torch's {name} has no portable result: {why}", refused=True)

    def look_around(self) -> None:
        """Watch the operations of other libraries loaded so far; each warns once when it is used."""
        for name in torch._C._dispatch_get_all_op_names():
            if not _is_torchs(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
                self._replace(
                    name,
                    f"{name} is not an operation of torch: its bits may differ on another processor",
                    refused=False,
                )

    def check(self) -> None:
        """Report kernels that depend on the processor: by a setting, or compiled for it since the run began.

        Raises:
            NondeterminismError: There are some, and the run was not told only to warn.
        """
        for what, (now, expected) in _choices().items():
            if now not in expected:
                self._say(
                    f"torch.backends.{what} is {now!r}, expected {expected[0]!r} with arithmetic='portable': else "
                    "the processor's AMX or caches choose kernels; leave it alone, or use arithmetic='native'",
                    refused=True,
                )
        if _num_compiled_graphs() > self._graphs:
            self._say(
                "torch.compile makes kernels for this processor, so their bits may differ on another one; leave it "
                "out, or use arithmetic='native'",
                refused=True,
            )

    def close(self) -> None:
        """Restore all operations."""
        for library in self._libraries.values():
            library._destroy()  # type: ignore[no-untyped-call]
        self._libraries.clear()

    def _replace(self, name: str, message: str, *, refused: bool) -> None:
        namespace, _, short = name.partition("::")
        original = torch.library.get_kernel(name, "CPU")

        def stand_in(keys: Any, *args: Any, **options: Any) -> Any:
            self._say(message, refused=refused)
            return original.call_boxed(keys, *args, **options)

        if namespace not in self._libraries:
            self._libraries[namespace] = Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of any replacement
            self._libraries[namespace].impl(  # type: ignore[no-untyped-call]
                short, stand_in, "CPU", with_keyset=True, allow_override=True
            )

    def _say(self, message: str, *, refused: bool) -> None:
        if refused and self._strict:
            raise NondeterminismError(message)
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, stacklevel=4)


def _is_torchs(name: str) -> bool:
    """Whether an operation is torch's own: from its C++, or from one of its Python files."""
    if name.startswith(("aten::", "prims::", "quantized::")):
        return True
    where = re.search(r"^debug: registered at (.*)", torch._C._dispatch_dump(name), re.MULTILINE)
    return where is not None and ("/pytorch/" in where[1] or where[1].startswith(_HOME))


def _choices() -> dict[str, tuple[object, tuple[object, ...]]]:
    """The settings by which a script can make kernels depend on the processor: found, and allowed values."""
    onednn: Any = torch.backends.mkldnn
    precisions = {name: getattr(onednn, name).fp32_precision for name in ("matmul", "conv", "rnn")}
    return {
        "mkldnn.enabled": (onednn.enabled, (True,)),
        **{f"mkldnn.{name}.fp32_precision": (now, ("ieee", "none")) for name, now in precisions.items()},
    }


def _num_compiled_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")  # not there: nothing was compiled
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
