"""Portable arithmetic in this process, from the beginning of a run to its end.

While it is open, torch's own library calls our kernels where it would call MKL's or the system's for matrix products,
roots and functions of single floats (`native/redirect.h`), whichever operation asks for them; from then on oneDNN cuts
its work for caches of fixed sizes (`native/caches.h`); what cannot be made equal is refused (`refusals.py`). The rest
follows from the settings (`settings.py`).
"""

import warnings
from typing import Literal

import torch

from evenstep.arithmetic.probe import differing, golden, probe
from evenstep.arithmetic.refusals import Refusals
from evenstep.core.errors import ConfigError, NondeterminismError
from evenstep.native import arithmetic

__all__ = ["Portable"]

_LIBRARY = "libtorch_cpu.so"
_NEEDED = {"sgemm_", "dgemm_", "sgemv_", "dgemv_", "cblas_sgemm_batch", "cblas_dgemm_batch", "vmsSqrt", "vmdSqrt"}
_SAMPLES = ("exp", "sqrt", "erf", "tanh strided", "linear 64x64x10", "conv2d 4x1x8x8 16x1x3x3 padding 1", "lstm cell")
"""Computed when a run begins: one case for each library whose kernels something else may have chosen."""

_num_open = 0


class Portable:
    """Portable arithmetic until it is closed. Several may be open; the first sets it up, the last undoes it.

    Args:
        on_nondeterminism: Whether an operation that cannot be made equal raises or only warns.
        sample: Whether to compare some operations with the golden table.

    Raises:
        ConfigError: This processor or this build of torch cannot do it.
        NondeterminismError: An operation's bits here differ from the golden table.
    """

    def __init__(self, on_nondeterminism: Literal["error", "warn"], *, sample: bool = True) -> None:
        _check_machine()
        self._strict = on_nondeterminism == "error"
        _redirect()
        self._refusals = Refusals(on_nondeterminism)
        self._looked = self._closed = False
        try:
            if sample:
                self._try_samples()
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Call before each step; see `Refusals.check`."""
        if not self._looked:
            self._refusals.look_around()
            self._looked = True
        self._refusals.check()

    def close(self) -> None:
        """Let torch compute as usual again."""
        if self._closed:
            return
        self._closed = True
        self._refusals.close()
        _restore()

    def _try_samples(self) -> None:
        table = golden()
        others = differing(probe(_SAMPLES), table.operations) if table.applies else []
        if others:
            message = (
                f"this machine computes {', '.join(others)} differently from the golden table; "
                "`evenstep doctor` says more"
            )
            if self._strict:
                raise NondeterminismError(f"{message}; Run(on_nondeterminism='warn') continues anyway")
            warnings.warn(message, stacklevel=5)


def _check_machine() -> None:
    if not arithmetic.bits():
        raise ConfigError("arithmetic='portable' needs an x86-64 processor with AVX2 and FMA; use arithmetic='native'")
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]
        raise ConfigError(
            "arithmetic='portable' needs a torch that was built with MKL and oneDNN, as those of PyPI are; "
            "install one of them, or use arithmetic='native'"
        )
    if not hasattr(torch.library, "get_kernel"):
        raise ConfigError(f"arithmetic='portable' needs torch 2.10 or later, found {torch.__version__}; upgrade it")
    capability = torch.backends.cpu.get_cpu_capability()
    if capability != "AVX2":
        raise ConfigError(
            f"torch computes with {capability} here, expected AVX2 with arithmetic='portable': ATEN_CPU_CAPABILITY was "
            "set after torch was loaded; start the script with `evenstep run --arithmetic portable`"
        )


def _redirect() -> None:
    global _num_open
    if _num_open == 0:
        try:
            arithmetic.pin_caches(_LIBRARY)
            missed = _NEEDED & set(arithmetic.redirect(_LIBRARY))
        except LookupError as error:
            raise ConfigError(
                f"arithmetic='portable' does not know this build of torch: {error}; install torch from PyPI, or use "
                "arithmetic='native'"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"arithmetic='portable' must read {_LIBRARY} and redirect its calls, which this system forbids: "
                f"{error}; use arithmetic='native'"
            ) from error
        if missed:
            arithmetic.restore()
            raise ConfigError(
                f"arithmetic='portable' does not know this build of torch: {_LIBRARY} does not call "
                f"{', '.join(sorted(missed))}; install torch from PyPI, or use arithmetic='native'"
            )
    _num_open += 1


def _restore() -> None:
    global _num_open
    _num_open -= 1
    if _num_open == 0:
        arithmetic.restore()
