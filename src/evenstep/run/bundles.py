"""How the parameters of a model are cut into bundles that travel separately between a group and its servers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from evenstep.core.errors import ConfigError
from evenstep.plan.groups import bundles_of

__all__ = ["Bundles"]


@dataclass(frozen=True)
class Bundles:
    """A pure value; bundles are numbered in the order of the model.

    Attributes:
        names: The parameters of each bundle.
        server_of: Which server of a server group has each bundle.
        trained: The numbers that an optimizer gives to the parameters of each bundle, last layer first; parameters
            that it does not train never change.
    """

    names: tuple[tuple[str, ...], ...]
    server_of: tuple[int, ...]
    trained: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int], trained: Sequence[str], num_servers: int) -> "Bundles":
        """Cut a model.

        Args:
            sizes: The bytes of all its parameters by name, in its order.
            trained: The names of those that the optimizer trains, in the optimizer's order.
            num_servers: Servers in a server group.

        Raises:
            ConfigError: There are more servers than layers.
        """
        layers: dict[str, list[str]] = {}
        for name in sizes:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        held = list(layers.values())
        ranges, servers = bundles_of([sum(sizes[name] for name in layer) for layer in held], num_servers)
        if len(set(servers)) < num_servers:
            raise ConfigError(
                f"{num_servers} servers in a group but the model has only {len(ranges)} layers with parameters: every "
                f"server needs one; use at most --servers-per-group {len(ranges)}"
            )
        names = tuple(tuple(name for k in bundle for name in held[k]) for bundle in ranges)
        index = {name: i for i, name in enumerate(trained)}
        by_bundle = tuple(tuple(index[name] for name in reversed(bundle) if name in index) for bundle in names)
        return cls(names, tuple(servers), by_bundle)

    @cached_property
    def filled(self) -> list[int]:
        """The bundles with trained parameters, in the order in which backward reaches them."""
        return [bundle for bundle in reversed(range(len(self.trained))) if self.trained[bundle]]

    @cached_property
    def bundle_of(self) -> dict[str, int]:
        """The bundle of every parameter, by name."""
        return {name: bundle for bundle, names in enumerate(self.names) for name in names}

    @cached_property
    def trained_by(self) -> dict[int, int]:
        """The bundle of every parameter that is trained, by its number."""
        return {i: bundle for bundle, held in enumerate(self.trained) for i in held}
