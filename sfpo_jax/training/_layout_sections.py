"""The sections `parallel`, `communication` and `memory`: where a run's work happens."""

import dataclasses
from typing import Any, Literal, get_args

from sfpo_jax._validate import check_at_least, check_range
from sfpo_jax.parallel import Offload, check_staleness
from sfpo_jax.training._build import Quantity
from sfpo_jax.tuning import check_chunk_size
from sfpo_jax.units import parse_bandwidth, parse_bytes

Algorithm = Literal[
    "none", "bf16", "int8", "1bit_adam", "sparse_1bit", "low_rank", "auto"
]


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Devices along each axis; -1 takes what the others leave."""

    node: int | Literal["hosts"] = "hosts"
    """Groups joined by slow links, hosts: one for each of them; with more than one,
    only those links are compressed."""
    data: int = -1
    """Devices of a group, each with its part of the batch."""
    op: int = 1
    """Devices that share each large product, and the tokens between them."""

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            if size == "hosts":
                continue
            if size < 1 and size != -1:
                raise ValueError(
                    f"`parallel.mesh.{name}` must be at least 1, or -1 for what is "
                    f"left, got {size}: it is a number of devices."
                )
        if list(sizes.values()).count(-1) > 1:
            raise ValueError(
                f"`parallel.mesh` may hold -1 once, got {sizes}: -1 takes what the "
                "other axes leave; give the others their size."
            )


@dataclasses.dataclass(frozen=True)
class Time:
    """Arithmetic done twice to store less."""

    recompute: Literal["none", "full", "auto"] = "none"
    """Keep all activations; compute those inside each block again; or, auto, keep those
    that save most arithmetic within the budget, found as the run starts."""
    budget: Quantity = "none"
    """What a device may hold during a step, with a unit; of auto alone."""

    def __post_init__(self) -> None:
        name = "parallel.time.budget"
        if self.budget != "none":
            parse_bytes(self.budget, name=name)
        if (self.recompute == "auto") != (self.budget != "none"):
            raise ValueError(
                f"`{name}` must be a size with parallel.time.recompute auto, for "
                f"example 40GB, and none without, got '{self.budget}' with "
                f"{self.recompute}."
            )

    @property
    def limit(self) -> str | None:
        """The budget as a step takes it."""
        return None if self.budget == "none" else self.budget


@dataclasses.dataclass(frozen=True)
class OperatorPieces:
    """How a product is shared along parallel.mesh.op."""

    chunk_size: int = 4
    """Pieces of a product, a multiple of parallel.mesh.op; twice that hides most."""
    prefetch_depth: int = 2
    """Pieces in flight, at most half of chunk_size."""

    def __post_init__(self) -> None:
        try:
            check_chunk_size(self.chunk_size, self.prefetch_depth)
        except ValueError as error:
            raise ValueError(f"`parallel.operator`: {error}") from None


@dataclasses.dataclass(frozen=True)
class Parallel:
    """How a step is laid out over devices and time."""

    mesh: Mesh = Mesh()
    operator: OperatorPieces = OperatorPieces()
    time: Time = Time()
    pipeline_depth: int = 2
    """Layers whose reduction is in flight under the products of others, with
    memory.gradient_release; 0 keeps the least memory."""
    staleness: int = 0
    """Steps that an update comes late: 1 hides what is sent under the passes of the
    next gradient, without memory.gradient_release, for one more gradient of memory."""
    microbatches: int = 1
    """Parts of a device's batch that run one after another to save memory."""
    cpu_devices: int = 8
    """Devices the host shows where JAX runs on the CPU alone."""

    def __post_init__(self) -> None:
        check_at_least(
            "parallel.microbatches", self.microbatches, 1, "the parts of a batch"
        )
        check_at_least("parallel.cpu_devices", self.cpu_devices, 1, "a device count")
        check_at_least(
            "parallel.pipeline_depth", self.pipeline_depth, 0, "layers in flight"
        )
        check_staleness(self.staleness, "parallel.staleness")


@dataclasses.dataclass(frozen=True)
class Compression:
    """What crosses the network."""

    algorithm: Algorithm = "1bit_adam"
    """none: dense AdamW. bf16, int8: gradients sent so, then AdamW. 1bit_adam: SFPO,
    masked gradients and momentum as signs. sparse_1bit: momentum as the signs of its
    largest entries, no masking. low_rank: gradients as factors of matrices, then AdamW,
    with a learning rate of its own. auto: what the cost model says is fastest."""
    error_feedback: bool = True
    """Add what compression lost to the next step, on both sides."""
    block_size: int | Literal["auto"] = "auto"
    """Entries that share a scale; auto: 256 for int8, 2048 for signs."""
    relaxation: float = 1.5
    """Factor on the scale of signs, in (0, 2); at 1 residuals take longer to leave."""
    density: float = 0.1
    """Share of the entries that sparse_1bit sends."""
    warmup: float | Literal["auto"] = 0.12
    """Share of the run before 1-bit Adam freezes its variance, or auto: when the
    variance is stable, after 20 % of the run at the latest."""
    refresh_every: int | Literal["none"] = 16
    """Each so many steps after the freeze one is dense and updates the variance."""
    sync_every: int = 1
    """Steps for which 1bit_adam and sparse_1bit send once: ranks take the others by
    themselves (0/1 Adam), for links below 100 Mbit/s; without masks, sharding and
    gradient release. 1: every step sends."""
    double_every: int | Literal["none"] = "none"
    """Steps after which sync_every doubles, from 1 at the freeze; none: as it is."""
    rank: int = 2
    """Columns of the factors that low_rank sends; 1 to 4 are usual."""
    auto_low_rank: bool = False
    """Whether auto may choose low_rank, for a learning rate found with it."""

    def __post_init__(self) -> None:
        prefix = "communication.compression"
        if self.block_size != "auto":
            # A multiple of 8, since signs are packed into whole bytes.
            if self.block_size < 8 or self.block_size % 8:
                raise ValueError(
                    f"`{prefix}.block_size` must be a positive multiple of 8, or auto, "
                    f"got {self.block_size}: it is the number of entries that share a "
                    "scale."
                )
        check_range(
            f"{prefix}.relaxation",
            self.relaxation,
            0.0,
            2.0,
            "the factor on the scale of signs",
            open_low=True,
            open_high=True,
        )
        check_range(
            f"{prefix}.density",
            self.density,
            0.0,
            1.0,
            "the share of entries sent",
            open_low=True,
        )
        check_at_least(
            f"{prefix}.rank", self.rank, 1, "the columns of a factor; 1 to 4 are usual"
        )
        check_at_least(
            f"{prefix}.sync_every", self.sync_every, 1, "the steps that one sends for"
        )
        if self.double_every != "none":
            check_at_least(
                f"{prefix}.double_every",
                self.double_every,
                1,
                "the steps until sync_every doubles",
            )
        if self.refresh_every != "none":
            check_at_least(
                f"{prefix}.refresh_every",
                self.refresh_every,
                2,
                "the steps from one dense step to the next; write none for no refresh",
            )
        if self.warmup != "auto":
            check_range(
                f"{prefix}.warmup",
                self.warmup,
                0.0,
                1.0,
                "a share of the run, not a number of steps; 0.1 to 0.2 is usual, "
                "longer than the run cannot be",
                open_low=True,
            )


@dataclasses.dataclass(frozen=True)
class TopologyAware:
    """Exact means where links are fast, compressed ones where they are slow."""

    enable: bool = False
    """Split the axes of the mesh by their bandwidth; false compresses between nodes, or
    over all devices of a single node."""
    bandwidth_threshold: Quantity = "50GB/s"
    """Axes at or above it are reduced exactly and first, their devices sharing the
    optimizer's states, so that the slower axes carry a part of the data only."""

    def __post_init__(self) -> None:
        _check_bandwidth(
            "communication.topology_aware.bandwidth_threshold", self.bandwidth_threshold
        )


@dataclasses.dataclass(frozen=True)
class LinkSpeeds:
    """What a device sends along each axis of the mesh, for auto and topology_aware."""

    node: Quantity = "measure"
    """Between nodes, with a unit; measure: by a short probe as the run starts."""
    data: Quantity = "measure"
    """Inside a node."""

    def __post_init__(self) -> None:
        for axis, value in dataclasses.asdict(self).items():
            if value != "measure":
                _check_bandwidth(f"communication.links.{axis}", value)

    def given(self) -> dict[str, float]:
        """Bytes a second of the axes that are not measured."""
        values = dataclasses.asdict(self).items()
        return {a: parse_bandwidth(v) for a, v in values if v != "measure"}


def _check_bandwidth(name: str, value: str) -> None:
    if parse_bandwidth(value, name=name) <= 0:
        raise ValueError(
            f"`{name}` must be positive, got '{value}': write for example 12.5GB/s."
        )


@dataclasses.dataclass(frozen=True)
class Communication:
    """What is sent, and in which portions."""

    compression: Compression = Compression()
    bucket_size: Quantity = "256MB"
    """Float32 bytes of leaves that travel together, with a unit."""
    topology_aware: TopologyAware = TopologyAware()
    links: LinkSpeeds = LinkSpeeds()

    def __post_init__(self) -> None:
        name = "communication.bucket_size"
        size = parse_bytes(self.bucket_size, name=name)
        if size < 4:
            raise ValueError(
                f"`{name}` must hold a float32, got '{self.bucket_size}': write at "
                "least 4B; 256MB is usual."
            )


@dataclasses.dataclass(frozen=True)
class Memory:
    """What the optimizer keeps, in which precision, and for how long."""

    gradient_release: bool = False
    """Apply a layer's gradient the moment it exists and drop it, by the layered step.
    optimizer.clip_norm then clips by the exact norm, at the price of a second backward
    pass."""
    rounding: Literal["none", "stochastic", "error_term"] = "none"
    """How bfloat16 weights keep small updates, with gradient_release: in the mean, for
    nothing; or for a byte a weight."""
    shard: Literal["none", "states", "weights"] = "none"
    """What each device keeps but its part of, with gradient_release: optimizer states,
    or weights, too."""
    offload: str = "none"
    """What of the layers lies in the host's memory, with gradient_release: states,
    weights, activations, joined by commas, or all. They come to the device a layer at
    a time."""
    mu_dtype: Literal["float32", "bfloat16", "int8", "packed"] = "float32"
    """First moment; int8: one byte a parameter; packed: as the bytes it arrived in
    (1-bit algorithms only, with communication.compression.refresh_every none)."""
    nu_dtype: Literal["float32", "bfloat16", "int8", "factored"] = "float32"
    """Second moment; int8: one byte a parameter; factored: means of the rows and
    columns of matrices alone."""
    error_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Residuals of the error feedback."""

    def __post_init__(self) -> None:
        known = get_args(Offload)
        for name in self.offloaded:
            if name not in known:
                raise ValueError(
                    f"`memory.offload` must be none, all, or some of "
                    f"{', '.join(known)} joined by commas, got '{self.offload}'."
                )

    @property
    def offloaded(self) -> tuple[Any, ...]:
        """The names, as a step takes them."""
        if self.offload in ("none", "all"):
            return get_args(Offload) if self.offload == "all" else ()
        return tuple(name.strip() for name in self.offload.split(","))
