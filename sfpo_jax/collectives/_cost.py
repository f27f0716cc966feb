"""Which way of averaging is fastest over one mesh axis: a model of its time.

    t = latency * messages + bytes / bandwidth + codec(entries)

For N ranks an exact all-reduce sends 2 (N - 1) / N of the float32 tensor in 2 (N - 1)
messages; a compressed mean sends 2 (N - 1) / N of the payload by an all-to-all and an
all-gather for each dtype of it (Thakur et al. 2005, "Optimization of Collective
Communication Operations in MPICH", https://doi.org/10.1177/1094342005051521). What
encoding and decoding take is measured, or estimated from the bandwidth of memory. On
fast links the codec costs more than it saves, and the answer is "dense". Factors of low
rank go by two all-reduces; how many numbers they have depends on the tensors' shapes,
of which a method keeps the share.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sfpo_jax import compression
from sfpo_jax._validate import check_at_least
from sfpo_jax.collectives._low_rank import low_rank_share
from sfpo_jax.compression import Compressor
from sfpo_jax.units import format_bandwidth

# What a GPU takes to start the kernels of a codec, and a message to cross a switch:
# the order of magnitude of NCCL, used where nothing was measured.
_LAUNCHES = 50e-6
LATENCY = 10e-6
# Bytes an entry: two passes that find the threshold, one that reads and writes.
_MASKING = 16


class Link(NamedTuple):
    """What one device sends along a mesh axis.

    Attributes:
      latency: seconds a message takes before its first byte.
      bandwidth: bytes a second in an all-reduce.
      exchange: bytes a second in an all-to-all and an all-gather, which compressed
        means are made of; None where it is not known to differ. Gloo, for one, fills
        a slow link by half in these.
    """

    latency: float
    bandwidth: float
    exchange: float | None = None


class Codec(NamedTuple):
    """What one device takes to compress, add up and decompress, nothing being sent.

    Attributes:
      points: (entries, seconds) of at least one size, in order; straight lines join
        them, and the last goes on.

    Example:
      >>> codec = Codec(((0, 0.1), (100, 0.2), (200, 0.5)))
      >>> [round(codec.seconds(n), 3) for n in (0, 50, 300)]
      [0.1, 0.15, 0.8]
    """

    points: tuple[tuple[int, float], ...]

    def seconds(self, entries: int) -> float:
        """Of so many entries."""
        if len(self.points) == 1:
            return self.points[0][1]
        pairs = list(itertools.pairwise(self.points))
        inside = [pair for pair in pairs if entries < pair[1][0]]
        (n0, t0), (n1, t1) = inside[0] if inside else pairs[-1]
        # A size that took less than a smaller one was measured badly.
        return max(t0 + (entries - n0) * max(t1 - t0, 0.0) / (n1 - n0), 0.0)


class Method(NamedTuple):
    """A way to average over an axis.

    Attributes:
      name: "dense", "bf16", "int8", "sign", "sparse_sign" or "low_rank".
      compressor: what goes on the wire; None: float32, by all-reduces.
      transfers: arrays of different dtypes that the payload consists of, or all-reduces
        that follow one another.
      touched: bytes of memory that its codec reads and writes for each entry, error
        feedback included; an estimate, for devices where nothing was measured.
      share: without a compressor, numbers sent for each entry.
      rank: of the factors that are sent, None for methods without.
      is_masked: whether `sparsify` comes before it, whose time counts as the codec's.
      every: steps that one exchange is for; estimates are of a step.
    """

    name: str
    compressor: Compressor | None
    transfers: int
    touched: int
    share: float = 1.0
    rank: int | None = None
    is_masked: bool = False
    every: int = 1

    @property
    def is_exact(self) -> bool:
        """Whether the mean is, by one all-reduce of all entries."""
        return self.compressor is None and self.rank is None

    @property
    def label(self) -> str:
        """What tells its codec from those of other methods and settings."""
        if self.compressor is not None:
            return self.compressor.name + ", masked" * self.is_masked
        return self.name if self.rank is None else f"{self.name}({self.rank})"

    def sent_bytes(self, entries: int, ranks: int) -> float:
        """Bytes one device sends to average float32[entries] over `ranks`."""
        full = 4 * self.share * entries
        if self.compressor is not None:
            full = self.compressor.payload_bytes(entries)
        return 2 * (ranks - 1) / ranks * full

    def messages(self, ranks: int) -> int:
        """Messages one device sends one after another."""
        if self.is_exact:
            return 2 * (ranks - 1)
        # There and back for each array, and the scalar that says all is finite.
        return 2 * (self.transfers + 1) * (ranks - 1)

    def codec(self, memory_bandwidth: float) -> Codec:
        """An estimate from the device's memory bandwidth, bytes a second."""
        if self.is_exact:
            return Codec(((0, 0.0),))
        touched = self.touched + _MASKING * self.is_masked
        million = _LAUNCHES + 1_000_000 * touched / memory_bandwidth
        return Codec(((0, _LAUNCHES), (1_000_000, million)))


def methods(
    *,
    density: float = 0.1,
    block_size: int | None = None,
    rank: int | None = None,
    shapes: Sequence[tuple[int, ...]] = (),
    is_masked: bool = False,
    sync_every: int = 1,
) -> dict[str, Method]:
    """All methods by name, the most exact first.

    Args:
      density: share of the entries that "sparse_sign" sends.
      block_size: entries a scale; None for the compressors' own.
      rank: of the factors of "low_rank", which is among the methods with it alone.
      shapes: of the tensors, needed with `rank`: they decide what factors save.
      is_masked: "sign" is that of SFPO, which masks the gradient first.
      sync_every: steps that "sign" and "sparse_sign" send once for, as 0/1 Adam does.

    Raises:
      ValueError: `rank` without `shapes`.

    Example:
      >>> low_rank = methods(rank=2, shapes=[(1000, 1000), (1000,)])["low_rank"]
      >>> low_rank.sent_bytes(1_001_000, ranks=2)  # 4 (2 * 2000 + 1000)
      20000.0
    """
    if rank is not None and not shapes:
        raise ValueError(
            f"`shapes` must be given with `rank` {rank}: what factors of low rank "
            "send depends on those of the tensors."
        )
    size = {} if block_size is None else {"block_size": block_size}
    signs, sparse = compression.sign(**size), compression.sparse_sign(density, **size)
    found = (
        Method("dense", None, 1, 0),
        # Contribution, error and payload, written and read again on both sides.
        Method("bf16", compression.bfloat16(), 1, 60),
        Method("int8", compression.int8(**size), 2, 60),
        # Fused: each leaf is read once.
        Method("sign", signs, 2, 28, is_masked=is_masked, every=sync_every),
        # Besides, three passes that find the largest entries.
        Method("sparse_sign", sparse, 2, 120, every=sync_every),
    )
    if rank is not None:
        # Contribution and error, read once each for P, Q and the new error, the mean
        # written and read.
        share = low_rank_share(shapes, rank)
        found += (Method("low_rank", None, 2, 40, share, rank),)
    return {method.name: method for method in found}


class Estimate(NamedTuple):
    """The time of one method, in seconds."""

    method: str
    network: float
    codec: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.network + self.codec


class Choice(NamedTuple):
    """The method of an axis and why; `print(choice)` gives the reasons.

    Attributes:
      method: the fastest.
      estimates: of all methods, the fastest first.
      entries: what is averaged, a number for each bucket.
      ranks: devices along the axis.
      link: what was assumed of the axis.
    """

    method: str
    estimates: tuple[Estimate, ...]
    entries: tuple[int, ...]
    ranks: int
    link: Link

    def __str__(self) -> str:
        first, *others = self.estimates
        rest = ", ".join(f"{x.method} {_time(x.seconds)}" for x in others)
        text = (
            f"{self.method}: {sum(self.entries):,} entries over {self.ranks} ranks at "
            f"{format_bandwidth(self.link.bandwidth, digits=3)} take "
            f"{_time(first.seconds)} (network {_time(first.network)}, codec "
            f"{_time(first.codec)})"
        )
        return f"{text}; {rest}" if rest else text


def estimate(
    method: Method, entries: int, ranks: int, link: Link, codec: Codec
) -> Estimate:
    """The time one method takes in a step to average float32[entries].

    Example:
      >>> link = Link(latency=1e-4, bandwidth=12.5e6)  # 100 Mbit/s
      >>> dense = methods()["dense"]
      >>> round(estimate(dense, 1_000_000, 2, link, Codec(((0, 0.0),))).seconds, 4)
      0.3202
    """
    bandwidth = link.bandwidth
    if method.compressor is not None and link.exchange is not None:
        bandwidth = link.exchange
    sent = method.sent_bytes(entries, ranks) / bandwidth
    network = link.latency * method.messages(ranks) + sent
    seconds = codec.seconds(entries)
    return Estimate(method.name, network / method.every, seconds / method.every)


def choose_method(
    entries: int | Sequence[int],
    ranks: int,
    link: Link,
    codecs: Mapping[str, Codec] | float,
    among: Mapping[str, Method] | None = None,
) -> Choice:
    """The fastest method for one axis.

    Args:
      entries: float32 entries averaged in a step, several for several buckets.
      ranks: devices along the axis.
      link: what the axis is joined by.
      codecs: measured, by method; those missing are left out. Or the device's memory
        bandwidth, bytes a second.
      among: the methods to choose from; None for `methods()`.

    Raises:
      ValueError: less than one entry or rank, or no method that has a codec.

    Example:
      >>> fast = choose_method(10_000_000, 8, Link(1e-5, 300e9), 2e12)
      >>> slow = choose_method(10_000_000, 8, Link(1e-5, 1.25e9), 2e12)
      >>> fast.method, slow.method
      ('dense', 'sparse_sign')
      >>> print(fast)
      dense: 10,000,000 entries over 8 ranks at 300 GB/s take 373 us (network 373 us,
      codec 0 us); sign 617 us, bf16 747 us, int8 829 us, sparse_sign 1.07 ms
    """
    sizes = (entries,) if isinstance(entries, int) else tuple(entries)
    for size in sizes or (0,):
        check_at_least("entries", size, 1, "a number of entries to average")
    check_at_least("ranks", ranks, 1, "the devices along the axis")
    found = []
    for name, method in (methods() if among is None else among).items():
        if isinstance(codecs, Mapping):
            if name not in codecs:
                continue
            codec = codecs[name]
        else:
            codec = method.codec(codecs)
        # Factors of all buckets travel together.
        joined = sizes if method.rank is None else (sum(sizes),)
        parts = [estimate(method, size, ranks, link, codec) for size in joined]
        network = sum(part.network for part in parts)
        found.append(Estimate(name, network, sum(part.codec for part in parts)))
    if not found:
        raise ValueError("`codecs` has none of the methods: measure or give one.")
    # Stable: of equals the more exact comes first.
    found.sort(key=lambda x: x.seconds)
    return Choice(found[0].method, tuple(found), sizes, ranks, link)


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
