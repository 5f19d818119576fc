"""Several prepared optimizers that step on one backward, such as one for matrices and one for everything else."""

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core.errors import ConfigError
from evenstep.engine.flat import FlatGradients
from evenstep.engine.gradients import Gradients
from evenstep.engine.kept import News
from evenstep.engine.prepared import PreparedOptimizer

__all__ = ["OptimizerSet", "Trained", "chosen"]


class OptimizerSet:
    """Some optimizers as if they were one: the parameters of the first, then those of the second, and so on.

    Args:
        optimizers: The optimizers, in the order in which they step.

    Attributes:
        gradients: The gradients of all parameters.

    Raises:
        ConfigError: A parameter is in two of them.
    """

    def __init__(self, optimizers: Sequence[PreparedOptimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self.gradients = GradientSet(self)
        self.check()

    def check(self) -> None:
        """Check that the optimizers train different parameters; some may have been added.

        Raises:
            ConfigError: They do not.
        """
        known: set[str] = set()
        for name in self.names:
            if name in known:
                raise ConfigError(
                    f"parameter '{name}' is in more than one of the optimizers of this step, and would be stepped "
                    "twice on one gradient; give every parameter to one of them"
                )
            known.add(name)

    @property
    def names(self) -> list[str]:
        """The names of all parameters. This and what follows is as in `PreparedOptimizer`."""
        return [name for each in self.optimizers for name in each.names]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all."""
        return [p for each in self.optimizers for p in each.parameters]

    def spans(self) -> Iterator[tuple[range, PreparedOptimizer]]:
        """Each optimizer with the numbers of its parameters."""
        first = 0
        for each in self.optimizers:
            yield range(first, first + len(each.names)), each
            first += len(each.names)

    def update(self, sums: dict[int, Tensor | None]) -> News:
        """Step one after another."""
        news: News = []
        for span, each in self.spans():
            mine = each.update({i - span.start: total for i, total in sums.items() if i in span})
            news += [[span.start + i, *rest] for i, *rest in mine]
        return news

    def settle(self, news: News, mine: Collection[int]) -> None:
        """Move what is new into the memory."""
        for span, each in self.spans():
            each.settle(_within(span, news), {i - span.start for i in mine if i in span})

    def adopt(self, news: News, took_part: bool) -> None:
        """Adopt the news of a committed operation."""
        for span, each in self.spans():
            each.adopt(_within(span, news), took_part)

    def stepped_elsewhere(self) -> None:
        """Note that others have stepped."""
        for each in self.optimizers:
            each.stepped_elsewhere()


class GradientSet:
    """The gradients of several optimizers' parameters. See `Gradients`."""

    def __init__(self, several: OptimizerSet) -> None:
        self._several = several
        self._place: list[tuple[Gradients | FlatGradients, int]] = []  # whose each parameter is, and its number there

    def begin(self, token: int, active: Sequence[int], shards: Sequence[int]) -> None:
        """Start a step."""
        self._several.check()
        self._place = [(each.gradients, i) for each in self._several.optimizers for i in range(len(each.names))]
        for each in self._several.optimizers:
            each.gradients.begin(token, active, shards)

    def arrive(self, i: int, shard: int, gradient: Tensor) -> None:
        """Take in a gradient."""
        gradients, number = self._place[i]
        assert isinstance(gradients, Gradients), "in shared memory gradients come one by one"
        gradients.arrive(number, shard, gradient)

    def take(self, shard: int, gradients: Sequence[Tensor | None]) -> None:
        """Take in all gradients of a shard; see `FlatGradients`."""
        for span, each in self._several.spans():
            assert isinstance(each.gradients, FlatGradients), "on a device gradients come all at once"
            each.gradients.take(shard, gradients[span.start : span.stop])

    def end_backward(self) -> None:
        """Note that backward is over on this worker."""
        for each in self._several.optimizers:
            each.gradients.end_backward()

    def finish(self) -> dict[int, Tensor | None]:
        """The sums of what this worker owns."""
        found = ((span.start, each.gradients.finish()) for span, each in self._several.spans())
        return {first + i: total for first, sums in found for i, total in sums.items()}


Trained = PreparedOptimizer | OptimizerSet
"""What a step trains."""


def chosen(
    prepared: Sequence[PreparedOptimizer], wanted: Optimizer | Sequence[Optimizer] | None
) -> list[PreparedOptimizer]:
    """The prepared optimizers that a step is to use.

    Args:
        prepared: All of them.
        wanted: One or several, in the order in which they step. None: the only one.

    Raises:
        ConfigError: It is not clear which, or one of them was not prepared.
    """
    if not prepared:
        raise ConfigError("no optimizer was prepared; call model, optimizer = run.prepare(model, optimizer) first")
    if wanted is None:
        if len(prepared) > 1:
            raise ConfigError(
                f"{len(prepared)} optimizers were prepared; say which one steps: run.step(..., optimizer=...)"
            )
        return list(prepared)
    found: list[PreparedOptimizer] = []
    for optimizer in wanted if isinstance(wanted, Sequence) else [wanted]:
        known = [each for each in prepared if each.optimizer is optimizer]
        if not known:
            raise ConfigError("this optimizer was not prepared; pass the one that run.prepare returned")
        if known[0] in found:
            raise ConfigError("an optimizer was passed twice; pass each once")
        found += known
    if not found:
        raise ConfigError("run.step got no optimizer in its list; pass at least one, or leave it out")
    return found


def _within(span: range, news: News) -> News:
    """The news of the parameters in a span, numbered as their optimizer does."""
    return [[i - span.start, *rest] for i, *rest in news if i in span]
