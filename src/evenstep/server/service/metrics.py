"""The figures of the server's status in the text format of Prometheus."""

from collections.abc import Iterable
from typing import Any

__all__ = ["CONTENT_TYPE", "exposition", "prometheus"]

CONTENT_TYPE = "text/plain; version=0.0.4"
Samples = Iterable[tuple[dict[str, str], float]]
Figure = tuple[str, str, str, Samples]


def prometheus(status: dict[str, Any]) -> str:
    """All figures of a status."""
    workers = status["workers"]

    def of_workers(key: str) -> Samples:
        return [({"worker": worker["name"]}, worker[key]) for worker in workers]

    def each(key: str, label: str) -> Samples:
        return [({label: name}, value) for name, value in sorted(status[key].items())]

    def one(value: float) -> Samples:
        return [({}, value)]

    found: list[Figure] = [
        ("version", "gauge", "How many updates the parameters have had.", one(status["version"])),
        ("parameter_bytes", "gauge", "Size of all parameters.", one(status["num_bytes"])),
        ("copies", "gauge", "Copies of the parameters in memory.", one(status["copies"])),
        ("uptime_seconds", "gauge", "Time since the start.", one(status["uptime_s"])),
        ("broken", "gauge", "1 if the server cannot continue.", one(int(status["broken"] is not None))),
        ("workers", "gauge", "Registered workers.", one(len(workers))),
        ("workers_dropped_total", "counter", "Workers that vanished.", one(status["dropped"])),
        ("worker_lag", "gauge", "Versions since a worker's last update.", of_workers("lag")),
        ("worker_last_seen_seconds", "gauge", "Time since a sign of life.", of_workers("last_seen_s")),
        ("worker_updates_total", "counter", "Updates of a worker.", of_workers("updates")),
        ("requests_total", "counter", "Requests.", each("requests", "verb")),
        ("request_seconds_total", "counter", "Time in requests.", each("request_seconds", "verb")),
        ("refused_total", "counter", "Refused requests.", each("refused", "status")),
        ("received_bytes_total", "counter", "Bytes of tensors received.", one(status["received_bytes"])),
        ("sent_bytes_total", "counter", "Bytes of tensors sent.", one(status["sent_bytes"])),
    ]
    return exposition("evenstep_server", found)


def exposition(prefix: str, found: Iterable[Figure]) -> str:
    """Figures as Prometheus reads them.

    Args:
        prefix: What all their names begin with.
        found: Name, kind, explanation and values of each.
    """
    lines: list[str] = []
    for name, kind, text, samples in found:
        lines += [f"# HELP {prefix}_{name} {text}", f"# TYPE {prefix}_{name} {kind}"]
        for labels, value in samples:
            inside = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
            lines.append(f"{prefix}_{name}{f'{{{inside}}}' if inside else ''} {value!r}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
