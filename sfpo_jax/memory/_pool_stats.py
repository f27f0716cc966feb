"""What a pool holds, in numbers and in words."""

from sfpo_jax.kernels import PoolNumbers
from sfpo_jax.units import format_bytes


class PoolStats(PoolNumbers):
    """The numbers of a `Pool`; printed, a table.

    Example:
      >>> from sfpo_jax.memory import Pool
      >>> pool = Pool(limit="10MiB", page="1MiB", cache="0B")
      >>> x = pool.array(1_500_000, "uint8")
      >>> stats = pool.stats()
      >>> stats.mapped, stats.largest_free, round(stats.fragmentation, 3)
      (2097152, 8985728, 0.0)
    """

    @property
    def fragmentation(self) -> float:
        """Share of what is free that cannot be had in one block, from 0 to 1."""
        return 1 - self.largest_free / self.free if self.free else 0.0

    def __str__(self) -> str:
        share = f"{self.fragmentation:.1%} of it in smaller pieces"
        rows = (
            ("in use", self.in_use, f"{self.blocks} blocks"),
            ("mapped", self.mapped, f"in pages of {format_bytes(self.page)}"),
            ("of it cached", self.cached, "pages that nothing lies in"),
            ("waiting", self.waiting, "freed on streams that are not there yet"),
            ("free", self.free, f"of a limit of {format_bytes(self.limit)}"),
            ("largest free", self.largest_free, share),
            ("peak mapped", self.peak_mapped, ""),
            ("addresses", self.reserved, "reserved; they cost nothing"),
            ("moved", self.moved, f"by {self.compactions} compactions"),
        )
        lines = [f"{a:<14}{format_bytes(b):>12}  {c}".rstrip() for a, b, c in rows]
        lines.append(
            f"{'pages':<14}{self.pages_mapped:>12}  mapped so far, "
            f"{self.pages_given_back} given back, {self.pages_moved} moved"
        )
        if self.damaged:
            lines.append(f"{'DAMAGED':<14}{self.damaged:>12}  writes after a free")
        return "\n".join(lines)
