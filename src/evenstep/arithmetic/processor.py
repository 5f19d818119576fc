"""What kind of processor this is: libraries choose their kernels by it."""

import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Processor", "read_processor"]

_NOTABLE = ("avx2", "fma", "avx512f", "amx_tile")


@dataclass(frozen=True)
class Processor:
    """A kind of processor.

    Attributes:
        maker: Such as GenuineIntel or AuthenticAMD.
        name: As it is sold.
        model: The maker's numbers for it, such as "family 25, model 17".
        features: The instruction sets it has that kernels are chosen by.
    """

    maker: str
    name: str
    model: str
    features: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"

    @property
    def kind(self) -> str:
        """Everything but the name."""
        return ", ".join(filter(None, (self.maker, self.model, " ".join(self.features) or "no AVX2")))


def read_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """The processor of this machine."""
    found = {"vendor_id": platform.machine(), "model name": "unknown", "flags": ""}
    with suppress(OSError):
        for line in cpuinfo.read_text().partition("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            found[key.strip()] = value.strip()
    numbers = (("cpu family", "family"), ("model", "model"))
    model = ", ".join(f"{word} {found[key]}" for key, word in numbers if key in found)
    features = tuple(name for name in _NOTABLE if name in found["flags"].split())
    return Processor(found["vendor_id"], found["model name"], model, features)
