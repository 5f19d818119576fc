"""`evenstep server`: build a model from a file, and serve its parameters."""

import argparse
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from evenstep.core.errors import ConfigError
from evenstep.server.hosting.server import JsonFormatter, ParameterServer

__all__ = ["serve"]


def serve(options: argparse.Namespace, staleness: int | None) -> int:
    """Serve in the foreground until SIGINT or SIGTERM.

    Raises:
        ConfigError: The file builds no model, or an option makes no sense.
    """
    torch.set_num_threads(options.threads)
    model, optimizer = _built(_function(options.model)())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    log = logging.getLogger("evenstep.server")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    token = None
    if options.token_file is not None:
        try:
            token = options.token_file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"--token-file {options.token_file} cannot be read: {error.strerror}") from error
    ParameterServer(
        model,
        optimizer,
        staleness=staleness,
        lock=not options.no_lock,
        workers=options.workers,
        host=options.host,
        port=options.port,
        transports=tuple(options.transports.split(",")),
        token=token,
        certfile=options.certfile,
        keyfile=options.keyfile,
        directory=options.directory,
        snapshot_every=options.snapshot_every,
        durable=options.durable,
        set_aside=options.set_aside,
        servers=options.servers,
        lease_s=options.lease,
        reject_nonfinite=options.reject_nonfinite,
        log_every_s=options.log_every,
    ).run()
    return 0


def _function(target: str) -> Callable[[], Any]:
    path, _, name = target.rpartition(":")
    if not path or not Path(path).is_file():
        raise ConfigError(f"there is no file {path or target!r}; say which function of which file builds the model, "
                          "such as model.py:build")  # fmt: skip
    spec = importlib.util.spec_from_file_location("__evenstep_model__", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file; name one that builds the model")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{path} has no function {name!r}")
    found: Callable[[], Any] = function
    return found


def _built(value: Any) -> tuple[nn.Module, Optimizer | None]:
    """What a builder may return: a model, or (model, optimizer)."""
    model, optimizer = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(model, nn.Module) or not (optimizer is None or isinstance(optimizer, Optimizer)):
        raise ConfigError(f"the function returned a {type(value).__name__}, expected a model or (model, optimizer)")
    return model, optimizer
