"""`evenstep graph`: the network of a script, its partition over shards and workers, and who owns what.

The script is run as `python train.py` would, up to its first `run.prepare(...)`: so it need not be written for this,
and nothing is trained.
"""

import argparse
import json
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from evenstep.core.config import DEFAULT_SHARDS, MAX_SHARDS
from evenstep.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser"]

_ENDINGS = (".json", ".svg", ".html")


def add_parser(commands: "Commands") -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "graph",
        help="draw the network of a script, its partition and the owners of parameters",
        description="Draw the network of a script, its partition over shards and workers, and who owns which "
        "parameter. The script is run up to its first run.prepare(...), or to its end if it has none.",
    )
    parser.add_argument("target", metavar="SCRIPT:NAME", help="a model in a script, or a function that makes one")
    parser.add_argument(
        "--shards", metavar="K", type=int, help=f"parts of every batch (default: the script's, or {DEFAULT_SHARDS})"
    )
    parser.add_argument("-n", "--workers", metavar="N", type=int, default=1, help="number of workers (default: 1)")
    parser.add_argument(
        "--input",
        metavar="SHAPE[:DTYPE]",
        action="append",
        default=[],
        help="the shape of an input, such as 8,3,32,32 or 8,128:int64, to find out all shapes; once for each input",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="where to: FILE.json, .svg or .html")
    parser.set_defaults(command=_graph)


def _graph(options: argparse.Namespace) -> int:
    script, _, name = options.target.rpartition(":")
    if not script or not name.isidentifier():
        raise ConfigError(f"{options.target!r} names no model; expected a script and a name, such as train.py:model")
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"there is no script {script}; name a Python file to read")
    if options.out.suffix not in _ENDINGS:
        raise ConfigError(f"--out {options.out}, expected a name that ends in {', '.join(_ENDINGS)}")
    if options.shards is not None and not 1 <= options.shards <= MAX_SHARDS:
        raise ConfigError(f"--shards {options.shards}, expected a whole number from 1 to {MAX_SHARDS}")
    from evenstep.picture import sheet  # here: importing torch takes seconds, a typo should not
    from evenstep.picture.trace import trace

    examples = [_example(words) for words in options.input]
    model, said = _find_model(path, name)
    shards = options.shards or said or DEFAULT_SHARDS
    network = trace(model, shards, options.workers, examples)
    if options.out.suffix == ".json":
        content = json.dumps(network.to_json(), indent=1)
    else:
        content = sheet.draw(network) if options.out.suffix == ".svg" else sheet.page(network)
    try:
        options.out.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {options.out} cannot be written: {error.strerror}") from error
    if network.note:
        print(f"evenstep: {network.note}", file=sys.stderr)
    size = f"{len(network.nodes)} nodes, {len(network.edges)} edges, by {network.source}"
    print(f"written: {options.out} ({size}; {shards} shards on {options.workers} workers)")
    return 0


def _example(words: str) -> "Tensor":
    import torch

    shape, _, kind = words.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    try:
        sizes = [int(size) for size in shape.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or not isinstance(dtype, torch.dtype):
        raise ConfigError(f"--input {words}, expected sizes above 0 and a dtype, such as 8,3,32,32 or 8,128:int64")
    return torch.zeros(sizes, dtype=dtype)


class _Enough(BaseException):
    """A script has prepared its model. Not an Exception, so a script's own `except` does not catch it."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        self.shards = shards


def _find_model(path: Path, name: str) -> tuple["nn.Module", int | None]:
    """The model of a script, and the number of shards that the script asks for."""
    from torch import nn

    names, shards = _run_script(path)
    if name not in names:
        known = [key for key, value in names.items() if isinstance(value, nn.Module)]
        hint = f"expected one of {', '.join(known)}" if known else "the script has made no module by then"
        raise ConfigError(f"{path} has no {name!r}; {hint}")
    found = names[name]
    if not isinstance(found, nn.Module) and callable(found):
        try:
            found = found()
        except Exception as error:
            raise ConfigError(f"{name}() of {path} failed: {type(error).__name__}: {error}") from error
    if not isinstance(found, nn.Module):
        raise ConfigError(f"{name!r} of {path} is a {type(found).__name__}, expected a torch.nn.Module")
    return found, shards


def _run_script(path: Path) -> tuple[dict[str, Any], int | None]:
    """The names of a script where it first calls `prepare`, or at its end; and its number of shards."""
    import evenstep
    from evenstep.run.run import Run

    class Look(Run):
        def prepare(self, *_: Any, **__: Any) -> NoReturn:
            """Stop the script here: the model is ready."""
            raise _Enough(self.shards)

    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    before = sys.modules["__main__"], sys.argv, sys.path[:]
    sys.modules["__main__"], sys.argv = module, [str(path)]
    sys.path.insert(0, str(path.resolve().parent))
    evenstep.Run = Look  # type: ignore[misc]
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except _Enough as enough:
        return {**module.__dict__, **_callers(enough)}, enough.shards
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path} failed before it prepared a model: {type(error).__name__}: {error}") from error
    finally:
        del evenstep.Run  # the next lookup imports the real one again
        sys.modules["__main__"], sys.argv, sys.path[:] = before
    return module.__dict__, None


def _callers(enough: _Enough) -> dict[str, Any]:
    """The local names of the functions on the way to `prepare`; inner ones hide outer ones."""
    names: dict[str, Any] = {}
    trace = enough.__traceback__
    trace = trace.tb_next if trace is not None else None  # the first is ours
    while trace is not None and trace.tb_next is not None:  # and so is the last
        names |= trace.tb_frame.f_locals
        trace = trace.tb_next
    return names
