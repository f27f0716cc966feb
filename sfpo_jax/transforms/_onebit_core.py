r"""1-bit Adam: Adam whose momentum crosses the network as one bit an entry.

Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
Convergence Speed", https://arxiv.org/abs/2102.02888. During the warm-up it is Adam on
exactly averaged gradients. Then the variance v is frozen, which makes the update linear
in the momentum, and only the momentum is averaged, compressed, with error feedback on
the workers' and on the server's side. With W the step of the freeze and t counting the
current step,

    warm-up:     g = mean_i g_i;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
                 u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    afterwards:  m = compressed mean of b1 m + (1 - b1) g_i
                 u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^W)) + eps)

An entry that had no gradient before the freeze has v = 0 and no denominator: it enters
no scale and its update is 0. One that had almost none has a denominator near zero, and
the noise of one bit over it makes steps without bounds: a run whose warm-up was masked
fails by that. Afterwards v therefore counts as at least `nu_floor` times the mean of
its block.

A variance frozen for good is most of the gap that this leaves to dense Adam. With
`refresh_every` = k each k-th step after the freeze is a dense one, and brings v up to
date with the weight of the k steps that it stands for:

    v = b2^k v + (1 - b2^k) g^2
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sfpo_jax._validate import Scalar
from sfpo_jax.collectives import (
    AxisName,
    Bucket,
    all_finite,
    axis_mean,
    axis_names,
    axis_size,
    mesh_axis_size,
    plan_buckets,
    vary,
    varying_axes,
)
from sfpo_jax.compression import Compressor
from sfpo_jax.kernels import AdamFactors, make_seed, raised_variance
from sfpo_jax.transforms._exchange import (
    Arrays,
    Exchange,
    Momenta,
    directions,
    unpack,
)
from sfpo_jax.transforms._freeze import FreezeRule, FreezeState
from sfpo_jax.transforms._in_place import Target
from sfpo_jax.transforms._moments import (
    bias_correction,
    load,
    next_variance,
    store,
    zeros_moment,
)
from sfpo_jax.transforms._run_once import run_once
from sfpo_jax.transforms._state import (
    PerRank,
    Selection,
    increment,
    own,
    per_rank,
    select,
    warn_if_reduced,
    zeros_per_rank,
    zeros_server_error,
)

Carry = tuple[Arrays, "ScaleByOnebitAdamState"]

# Names of the two phases in a compiled program's metadata.
WARMUP_SCOPE = "sfpo_warmup"
COMPRESSED_SCOPE = "sfpo_compressed"


class ScaleByOnebitAdamState(NamedTuple):
    """State of `scale_by_onebit_adam` and `onebit_adam`.

    A tree has the structure of the parameters, `optax.MaskedNode()` in place of leaves
    that are not floating or empty.
    """

    # Steps that were not skipped, int32[].
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    freeze: FreezeState  # when the variance freezes
    mu: Any  # tree, first moment; packed: its payload, of each bucket's groups
    nu: Any  # tree, second moment
    worker_error: PerRank  # tree; packed: the first moment during the warm-up
    server_error: PerRank  # [rows / N, width] of each bucket's groups


def is_compressed_step(
    state: ScaleByOnebitAdamState, refresh_every: Scalar | None
) -> jax.Array:
    """Whether the next step sends the momentum compressed, bool[]."""
    since = _since_freeze(state)
    if refresh_every is None:
        return since >= 0
    return (since >= 0) & ((since + 1) % refresh_every != 0)


def _since_freeze(state: ScaleByOnebitAdamState) -> jax.Array:
    """Steps since the freeze, negative before it, int32[]."""
    return state.count - state.freeze.step


@dataclass(frozen=True)
class OnebitAdam:
    """The algorithm, its arguments checked; `onebit_adam` is its public face.

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
        buckets = self._buckets(chosen, ranks)

        def zeros(kind: Any, signed: bool) -> Any:
            shapes = chosen.shapes()
            return chosen.state(
                [zeros_moment(s, kind, work, signed=signed) for s in shapes]
            )

        kept = (self.error_dtype, work, self.axis_name)
        worker, server = (), ()
        if self.has_feedback or self.is_packed:
            worker = chosen.state(zeros_per_rank(chosen.shapes(), *kept))
        if self.has_feedback:
            server = zeros_server_error(buckets, ranks, *kept)
        packed = self._empty_payloads(buckets, work)
        return ScaleByOnebitAdamState(
            count=jnp.zeros([], jnp.int32),
            freeze=self.freeze.init(),
            mu=packed if self.is_packed else zeros(self.mu_dtype, True),
            nu=zeros(self.nu_dtype, False),
            worker_error=PerRank(worker),
            server_error=PerRank(server),
        )

    def step(
        self,
        updates: optax.Updates,
        state: ScaleByOnebitAdamState,
        target: Target | None = None,
    ) -> tuple[Selection, Arrays, ScaleByOnebitAdamState, jax.Array]:
        """One step: (leaves, directions u, new state, whether it was taken).

        With a target its new parameters come in place of the directions.
        """
        chosen = select(updates)
        work = chosen.working_dtype()
        warn_if_reduced(chosen.chosen(), self.axis_name)
        self._check_packed(state)
        taken = all_finite(chosen.chosen(), self.axis_name)
        is_compressed = is_compressed_step(state, self.refresh_every)

        def warmup(carry: Carry) -> Carry:
            with jax.named_scope(WARMUP_SCOPE):
                held = carry[1]
                if self.is_packed and _axes(held) != _axes(state):
                    # The first moment that lies there is alike on all ranks, which the
                    # checks would no longer see.
                    held = held._replace(worker_error=state.worker_error)
                found, new = self._warmup(chosen, held)
                found = found if target is None else target.moved(found)
                return found, self._with_own_errors(new)

        def compressed(carry: Carry) -> Carry:
            with jax.named_scope(COMPRESSED_SCOPE):
                found, new = self._compressed(chosen, carry[1], target)
                return found, self._with_own_errors(new)

        if target is None:
            # Made of v, they vary over the same axes as what will take their place.
            start = [jnp.zeros_like(v) for v in _load(work, chosen.read(state.nu))]
        else:
            start = target.params
        carry = (start, self._with_own_errors(state))
        carry = run_once(taken & ~is_compressed, warmup, carry)
        found, state = run_once(taken & is_compressed, compressed, carry)
        return chosen, found, state, taken

    def _warmup(
        self, chosen: Selection, state: ScaleByOnebitAdamState
    ) -> tuple[Arrays, ScaleByOnebitAdamState]:
        """Adam, bias-corrected, on the exact mean; after the freeze, a refresh of v."""
        b1, b2, work = self.b1, self.b2, chosen.working_dtype()
        is_refresh = _since_freeze(state) >= 0
        if self.refresh_every is not None:
            b2 = jnp.where(is_refresh, jnp.power(b2, self.refresh_every), b2)
            b2 = b2.astype(work)
        grads = axis_mean(chosen.widened(), self.axis_name)
        worker = own(state.worker_error.tree, self.axis_name)
        mu = _load(work, chosen.read(worker if self.is_packed else state.mu))
        mu = [b1 * m + (1 - b1) * g for m, g in zip(mu, grads, strict=True)]
        count = increment(state.count)
        seed = make_seed(count)
        pairs = [
            next_variance(v, g, b2, seed)
            for v, g in zip(chosen.read(state.nu), grads, strict=True)
        ]
        nu = [v for v, _ in pairs]
        variances = nu
        if self.refresh_every is not None:
            buckets = self._buckets(chosen, axis_size(self.axis_name))
            rows = [
                [raised_variance(x, self.nu_floor) for x in bucket.pack(nu)]
                for bucket in buckets
            ]
            raised = unpack(buckets, rows, chosen.shapes())
            variances = [
                jnp.where(is_refresh, r, v) for r, v in zip(raised, nu, strict=True)
            ]
        found = directions(mu, variances, self._factors(count, count, work))
        correction = bias_correction(self.b2, count, work)
        norm = sum((jnp.sum(v) for v in nu), jnp.zeros([], work)) / correction
        freeze = self.freeze.observe(state.freeze, count, norm)
        freeze = jax.tree.map(
            lambda new, old: jnp.where(is_refresh, old, new), freeze, state.freeze
        )
        if self.is_packed:
            held = per_rank(self._hold(chosen, mu, worker), self.axis_name)
            state = state._replace(worker_error=PerRank(held))
        else:
            state = state._replace(mu=self._hold(chosen, mu, state.mu))
        return found, state._replace(
            count=count,
            freeze=freeze,
            nu=chosen.state([node for _, node in pairs]),
        )

    def _compressed(
        self, chosen: Selection, state: ScaleByOnebitAdamState, target: Target | None
    ) -> tuple[Arrays, ScaleByOnebitAdamState]:
        """Adam with v frozen and the mean of the momenta compressed."""
        work = chosen.working_dtype()
        buckets = self._buckets(chosen, axis_size(self.axis_name))
        exchange = Exchange(self.compressor, buckets, self.axis_name)
        nu = _load(work, chosen.read(state.nu))
        worker = own(state.worker_error.tree, self.axis_name)
        server = own(state.server_error.tree, self.axis_name)
        has_errors = self.has_feedback or self.is_packed
        errors = _load(work, chosen.read(worker)) if has_errors else []
        if self.is_packed:
            is_first = state.count == state.freeze.step
            mu = _load(work, exchange.decode(state.mu, nu))
            mu = [jnp.where(is_first, e, m) for m, e in zip(mu, errors, strict=True)]
            errors = [jnp.where(is_first, 0, e) for e in errors]
        else:
            mu = _load(work, chosen.read(state.mu))
        count = increment(state.count)
        start = Momenta(
            grads=chosen.widened(),
            mu=mu,
            errors=errors if self.has_feedback else [],
            server_error=(
                [_load(work, rows) for rows in server] if self.has_feedback else None
            ),
            nu=nu,
        )
        factors = self._factors(count, self._last_refresh(state), work)
        found = exchange.average(start, self.b1, factors, target)
        if self.has_feedback:
            held = self._hold(chosen, found.worker_error, worker)
            server = jax.tree.map(store, found.server_error, server)
            state = state._replace(
                worker_error=PerRank(per_rank(held, self.axis_name)),
                server_error=PerRank(per_rank(server, self.axis_name)),
            )
        if self.is_packed:
            mu = found.payload
        else:
            mu = self._hold(chosen, found.mu, state.mu)
        return found.moved, state._replace(count=count, mu=mu)

    def _factors(
        self, count: jax.Array, updated_at: jax.Array, work: Any
    ) -> AdamFactors:
        """Scalars of the update that ends with `count`; v is of step `updated_at`."""
        return AdamFactors(
            m_correction=bias_correction(self.b1, count, work),
            v_correction=bias_correction(self.b2, updated_at, work),
            eps=self.eps,
            nu_floor=self.nu_floor,
        )

    def _last_refresh(self, state: ScaleByOnebitAdamState) -> jax.Array:
        """The step that v was last brought up to, int32[]."""
        if self.refresh_every is None:
            return state.freeze.step
        return state.count - _since_freeze(state) % self.refresh_every

    def _check_packed(self, state: ScaleByOnebitAdamState) -> None:
        """Raises TypeError where the types along the axis cannot be right."""
        names = set(axis_names(self.axis_name))
        held = jax.tree.leaves(state.worker_error)
        if self.is_packed and any(names & varying_axes(leaf) for leaf in held):
            raise TypeError(
                '`mu_dtype="packed"` needs `shard_map(..., check_vma=False)`: its '
                "checks cannot see that the first moment, which waits in each rank's "
                "own buffer during the warm-up, is alike on all ranks."
            )

    def _with_own_errors(self, state: ScaleByOnebitAdamState) -> ScaleByOnebitAdamState:
        """The state, its errors marked as each rank's own: alike in all branches."""
        return state._replace(
            worker_error=vary(state.worker_error, self.axis_name),
            server_error=vary(state.server_error, self.axis_name),
        )

    def _buckets(self, chosen: Selection, ranks: int) -> tuple[Bucket, ...]:
        return plan_buckets(chosen.sizes(), self.compressor, ranks, self.bucket_entries)

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

    @staticmethod
    def _hold(chosen: Selection, values: Arrays, old: Any) -> Any:
        """A state tree of `values`, kept as those of `old` are."""
        held = chosen.read(old)
        return chosen.state([store(v, o) for v, o in zip(values, held, strict=True)])


def _load(dtype: Any, nodes: Any) -> Arrays:
    return [load(node, dtype) for node in nodes]


def _axes(state: ScaleByOnebitAdamState) -> list[frozenset[str]]:
    """Axes that each array of the worker error is held to vary over."""
    return [varying_axes(x) for x in jax.tree.leaves(state.worker_error)]
