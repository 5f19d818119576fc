"""Connecting to a Ray cluster, and what cannot be done over a connection from outside of it."""

import socket
from typing import Any

import ray

from evenstep.core import env
from evenstep.core.errors import ConfigError

__all__ = ["connect", "is_client", "refuse_far"]

_KNOCKING_S = 10.0


def connect(address: str | None, working_dir: str | None) -> bool:
    """Connect to a cluster; returns False if Ray was connected already."""
    if ray.is_initialized():
        there = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", there):
            raise ConfigError(
                f"address={address!r}, but Ray is connected already, to {there}; leave it out, or disconnect first: "
                "ray.shutdown()"
            )
        if working_dir is not None:
            raise ConfigError(
                f"working_dir={working_dir!r}, but Ray is connected already; set it when connecting: "
                "ray.init(runtime_env={'working_dir': ...})"
            )
        return False
    where = address or env.ray_address() or "auto"
    try:
        _knock(where)
        ray.init(
            address=where,
            log_to_driver=False,
            logging_level="error",
            runtime_env=None if working_dir is None else {"working_dir": working_dir},
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster can be reached at {where}: {str(error).splitlines()[0]}; start one with `ray start "
            "--head`, or set RAY_ADDRESS"
        ) from error
    return True


def _knock(address: str) -> None:
    """Check that something listens at the address: Ray itself would wait for minutes.

    Raises:
        OSError: Nothing does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), _KNOCKING_S).close()


def is_client() -> bool:
    """Whether we are connected by `ray://`, from outside of the cluster."""
    return bool(ray.util.client.ray.is_connected())


def refuse_far(**options: Any) -> None:
    """Refuse what the head would do on its own machine, which is not the caller's.

    Raises:
        ConfigError: One of the options is given.
    """
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{name}={value!s}, but by ray:// the head of the run is on another machine, in the cluster; leave it "
                "out, or start the run there"
            )
