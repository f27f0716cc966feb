"""State of 1-bit Adam, and the arguments that decide what it looks like."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sfpo_jax._validate import Scalar
from sfpo_jax.collectives import AxisName, Bucket, WireLayout, mesh_axis_size
from sfpo_jax.compression import Compressor
from sfpo_jax.transforms._freeze import FreezeRule, FreezeState
from sfpo_jax.transforms._moments import zeros_moment
from sfpo_jax.transforms._state import (
    PerRank,
    Selection,
    select,
    zeros_per_rank,
    zeros_server_error,
)


class ScaleByOnebitAdamState(NamedTuple):
    """State of `scale_by_onebit_adam` and `onebit_adam`.

    A tree has the structure of the parameters, `optax.MaskedNode()` in place of leaves
    that are not floating or empty.
    """

    # Steps that were not skipped, int32[].
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    freeze: FreezeState  # when the variance freezes
    compresses_next: jax.Array  # bool[], whether the next step sends bits
    mu: Any  # tree, first moment; packed: its payload, of each bucket's groups
    nu: Any  # tree, second moment
    worker_error: PerRank  # tree; packed: the first moment during the warm-up
    server_error: PerRank  # [rows / N, width] of each bucket's groups


@dataclass(frozen=True)
class OnebitArguments:
    """The arguments of the algorithm, checked.

    With `is_packed` the first moment is kept as the bytes it arrived in, and the buffer
    of the worker error, which the warm-up has no use for, holds it until the freeze.
    """

    b1: Scalar
    b2: Scalar
    eps: Scalar
    freeze: FreezeRule
    axis_name: AxisName
    compressor: Compressor
    has_feedback: bool
    is_packed: bool
    mu_dtype: Any
    nu_dtype: Any
    nu_floor: Scalar
    refresh_every: Scalar | None
    error_dtype: Any
    bucket_entries: int

    def init(self, params: optax.Params) -> ScaleByOnebitAdamState:
        """State of zeros; outside `shard_map` call it under `jax.set_mesh(mesh)`."""
        chosen = select(params)
        work = chosen.working_dtype()
        ranks = mesh_axis_size(self.axis_name)
        layout = self.layout_of(chosen)

        def zeros(kind: Any, signed: bool) -> Any:
            shapes = chosen.shapes()
            return chosen.state(
                [zeros_moment(s, kind, work, signed=signed) for s in shapes]
            )

        kept = (self.error_dtype, work, self.axis_name)
        worker, server = (), PerRank(())
        if self.has_feedback or self.is_packed:
            worker = chosen.state(zeros_per_rank(chosen.shapes(), *kept))
        if self.has_feedback:
            server = zeros_server_error(layout, *kept)
        packed = self._empty_payloads(layout.buckets(ranks), work)
        return ScaleByOnebitAdamState(
            count=jnp.zeros([], jnp.int32),
            freeze=self.freeze.init(),
            compresses_next=jnp.bool_(False),
            mu=packed if self.is_packed else zeros(self.mu_dtype, True),
            nu=zeros(self.nu_dtype, False),
            worker_error=PerRank(worker),
            server_error=server,
        )

    def buckets(self, chosen: Selection, ranks: int) -> tuple[Bucket, ...]:
        """How leaves travel together."""
        return self.layout_of(chosen).buckets(ranks)

    def layout_of(self, chosen: Selection) -> WireLayout:
        return WireLayout(chosen.sizes(), self.compressor, self.bucket_entries)

    def _empty_payloads(self, buckets: tuple[Bucket, ...], work: Any) -> Any:
        """Payloads of zeros, of every group of every bucket."""

        def encode(rows: int, width: int) -> Any:
            zeros = jnp.zeros((rows, width), work)
            return self.compressor.encode(zeros, zeros > 0)

        shapes = [[(g.rows, g.width) for g in bucket.groups] for bucket in buckets]
        payloads = jax.eval_shape(
            lambda: tuple(tuple(encode(*shape) for shape in group) for group in shapes)
        )
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), payloads)
