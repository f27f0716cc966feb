"""What `experiments.bench.network` measures: hosts, links, contenders, how often."""

import dataclasses

from experiments.bench.network_bounds import FREE
from experiments.bench.network_cells import CONTENDERS
from experiments.bench.network_task import VIT
from experiments.models.vit import ViTConfig
from sfpo_jax.training import ConfigError
from sfpo_jax.units import parse_bandwidth


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure, and where to."""

    hosts: str | int = "2,4"
    """Numbers of hosts, by commas."""
    bandwidths: str = "100Mbit/s,1Gbit/s,unlimited"
    """Of each host's link, by commas."""
    contenders: str = "all"
    """Which, by commas."""
    rounds: int = 3
    """Turns of each contender."""
    steps: int = 2
    """Steps of a turn that are timed, after one that is not."""
    batch: int = 32
    """Rows of one host."""
    width: int = VIT.width
    """Features of a token; a head has 64."""
    depth: int = VIT.depth
    """Blocks."""
    train_steps: int = 40
    """Steps of the runs that are tested as they go, 2 hosts; 0 leaves them out."""
    train_bandwidth: str = "100Mbit/s"
    """Of the links in these runs."""
    train_every: int = 4
    """Steps between tests."""
    rates: str | float = 1e-3
    """Learning rates that each run is tried at, by commas; the best is reported."""
    target: float = 0.85
    """Test accuracy to be reached."""
    torch_python: str = ""
    """An interpreter that has PyTorch; empty: this one, where it has it."""
    out: str = "docs/results/network.json"
    """The file of results; table and picture lie beside it."""

    def __post_init__(self) -> None:
        for name, least in {
            "rounds": 1,
            "steps": 1,
            "batch": 1,
            "depth": 1,
            "train_steps": 0,
        }.items():
            if getattr(self, name) < least:
                raise ConfigError(
                    f"`{name}` must be at least {least}, got {getattr(self, name)}"
                )
        if self.width < 64 or self.width % 64:
            raise ConfigError(
                f"`width` must be a multiple of 64, got {self.width}: a head has 64"
            )
        if not all(word.isdigit() and int(word) > 1 for word in _words(self.hosts)):
            raise ConfigError(
                f"`hosts` must be numbers from 2 by commas, got {self.hosts!r}"
            )
        if self.contenders != "all":
            if unknown := set(_words(self.contenders)) - set(CONTENDERS):
                raise ConfigError(
                    f"`contenders` must be all or of {', '.join(CONTENDERS)}, got "
                    f"{', '.join(sorted(unknown))}"
                )
        try:
            self.links()
            self.train_bits()
            self.learning_rates()
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def chosen(self) -> list[str]:
        """The contenders' names; those without communication are always among them."""
        if self.contenders == "all":
            return list(CONTENDERS)
        named = set(_words(self.contenders))
        named |= {CONTENDERS[name].alone for name in named}
        return [name for name in CONTENDERS if name in named]

    def links(self) -> dict[str, float | None]:
        """Bits a second by the name of the link; None: not limited."""
        found: dict[str, float | None] = {}
        for word in _words(self.bandwidths):
            bits = _bits(word, "bandwidths")
            found[link_name(bits)] = bits
        return found

    def model(self) -> ViTConfig:
        """The network."""
        return dataclasses.replace(
            VIT,
            width=self.width,
            depth=self.depth,
            heads=self.width // 64,
            mlp_width=4 * self.width,
        )

    def host_counts(self) -> list[int]:
        """Numbers of hosts."""
        return [int(word) for word in _words(self.hosts)]

    def train_bits(self) -> float | None:
        """Bits a second of the links in runs; None: not limited."""
        return _bits(self.train_bandwidth, "train_bandwidth")

    def learning_rates(self) -> list[float]:
        """Those that each run is tried at."""
        return [float(word) for word in _words(self.rates)]


def _words(text: object) -> list[str]:
    return [word.strip() for word in str(text).split(",")]


def _bits(text: str, name: str) -> float | None:
    return None if text == "unlimited" else 8 * parse_bandwidth(text, name=name)


def link_name(bits: float | None) -> str:
    """How a link is called in the results.

    Example:
      >>> link_name(1e8), link_name(1e9), link_name(None)
      ('100 Mbit/s', '1 Gbit/s', 'not limited')
    """
    if bits is None:
        return FREE
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.4g} Mbit/s"
