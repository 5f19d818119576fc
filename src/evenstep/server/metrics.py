"""The server's figures in the text format of Prometheus."""

from collections.abc import Iterable
from typing import Any

from evenstep.server.service import Service

__all__ = ["prometheus"]


def prometheus(service: Service) -> str:
    """All figures."""
    status = service.store.status()
    workers = status["workers"]
    lines: list[str] = []

    def add(name: str, kind: str, text: str, samples: Iterable[tuple[dict[str, Any], float]]) -> None:
        lines.append(f"# HELP evenstep_server_{name} {text}")
        lines.append(f"# TYPE evenstep_server_{name} {kind}")
        for labels, value in samples:
            inside = ",".join(f'{key}="{_escape(str(text))}"' for key, text in labels.items())
            lines.append(
                f"evenstep_server_{name}{{{inside}}} {value:g}" if inside else f"evenstep_server_{name} {value:g}"
            )

    add("version", "gauge", "How many updates the parameters have had.", [({}, status["version"])])
    add("parameter_bytes", "gauge", "Size of all parameters.", [({}, status["num_bytes"])])
    add("copies", "gauge", "Copies of the parameters in memory.", [({}, status["copies"])])
    add("workers", "gauge", "Registered workers.", [({}, len(workers))])
    add(
        "worker_lag",
        "gauge",
        "Versions since a worker's last update.",
        [({"worker": w["name"]}, w["lag"]) for w in workers],
    )
    add("worker_updates", "counter", "Updates of a worker.", [({"worker": w["name"]}, w["updates"]) for w in workers])
    add("requests_total", "counter", "Requests.", [({"verb": verb}, n) for verb, n in sorted(service.counts.items())])
    add(
        "request_seconds_total",
        "counter",
        "Time in requests.",
        [({"verb": v}, s) for v, s in sorted(service.seconds.items())],
    )
    add(
        "refused_total",
        "counter",
        "Refused requests.",
        [({"status": c}, n) for c, n in sorted(service.refusals.items())],
    )
    add("received_bytes_total", "counter", "Bytes of tensors received.", [({}, service.bytes_in)])
    add("sent_bytes_total", "counter", "Bytes of tensors sent.", [({}, service.bytes_out)])
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
