r"""0/1 Adam: 1-bit Adam whose ranks take steps of their own between two exchanges.

Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1
Adam", https://arxiv.org/abs/2202.06009, algorithm 1. After the warm-up of 1-bit Adam,
with its frozen variance v and D = sqrt(v / (1 - b2^W)) + eps, rank i goes on from the
parameters p that all share by itself,

    m_i = b1 m_i + (1 - b1) g_i;  d_i = (1 - eta l) d_i + eta m_i / (1 - b1^t) / D

where g_i is taken at p - d_i, eta is the learning rate and l the decoupled decay, which
moves p, too. At a synchronisation

    u = compressed mean of d_i D;  p = p - u / D;  d_i = 0
    m_i = (1 - b1^t) u / (sum of eta since the last one)

so that what crosses the network is one bit an entry for all steps since the last time.

Two departures from the paper: v is that of 1-bit Adam's warm-up, and bias corrections
are applied. With `refresh_every` = k a synchronisation that comes k steps or more after
v was last up to date also averages the gradients exactly, and brings v up to date with
the weight of all these steps, as 1-bit Adam does here.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sfpo_jax._validate import Scalar
from sfpo_jax.collectives import (
    all_finite,
    axis_mean,
    axis_names,
    vary,
    varying_axes,
)
from sfpo_jax.transforms._exchange import Arrays, Momenta, directions
from sfpo_jax.transforms._freeze import FreezeState
from sfpo_jax.transforms._in_place import Target
from sfpo_jax.transforms._moments import bias_correction, load, zeros_moment
from sfpo_jax.transforms._onebit_core import OnebitAdam
from sfpo_jax.transforms._phase import (
    COMPRESSED_SCOPE,
    LOCAL_SCOPE,
    REFRESH_SCOPE,
    WARMUP_SCOPE,
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


class ZeroOneAdamState(NamedTuple):
    """State of `zero_one_adam`.

    A tree has the structure of the parameters, `optax.MaskedNode()` in place of leaves
    that are not floating or empty.
    """

    # Steps that were not skipped, int32[].
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    freeze: FreezeState  # when the variance freezes
    since: jax.Array  # int32[], steps since the last synchronisation
    rates: jax.Array  # float[], sum of their learning rates
    updated: jax.Array  # int32[], the step that v is up to date with
    mu: PerRank  # tree, first moment
    nu: Any  # tree, second moment
    drift: PerRank  # tree, shared parameters less this rank's own
    worker_error: PerRank  # tree
    server_error: PerRank  # [rows / N, width] of each bucket's groups


Moved = tuple[Arrays, ZeroOneAdamState]


@dataclass(frozen=True)
class ZeroOneAdam:
    """The algorithm; `zero_one_adam` is its public face.

    Attributes:
      base: whose warm-up, freeze and exchange these are.
      sync_every: steps from one synchronisation to the next, at most.
      double_every: steps after which they are doubled, from one on; None: `sync_every`
        from the start.
    """

    base: OnebitAdam
    sync_every: Scalar
    double_every: Scalar | None

    def init(self, params: optax.Params) -> ZeroOneAdamState:
        """State of zeros; outside `shard_map` call it under `jax.set_mesh(mesh)`."""
        chosen = select(params)
        work = chosen.working_dtype()
        layout = self.base.layout_of(chosen)

        def own_zeros(kind: Any) -> PerRank:
            arrays = zeros_per_rank(chosen.shapes(), kind, work, self.base.axis_name)
            return PerRank(chosen.state(arrays))

        server = PerRank(())
        if self.base.has_feedback:
            kept = (self.base.error_dtype, work, self.base.axis_name)
            server = zeros_server_error(layout, *kept)
        return ZeroOneAdamState(
            count=jnp.zeros([], jnp.int32),
            freeze=self.base.freeze.init(),
            since=jnp.zeros([], jnp.int32),
            rates=jnp.zeros([], work),
            updated=jnp.zeros([], jnp.int32),
            mu=own_zeros(None),
            nu=chosen.state([zeros_moment(s, None, work) for s in chosen.shapes()]),
            drift=own_zeros(None),
            worker_error=(
                own_zeros(self.base.error_dtype)
                if self.base.has_feedback
                else PerRank(())
            ),
            server_error=server,
        )

    def update(
        self, updates: optax.Updates, state: ZeroOneAdamState, target: Target
    ) -> tuple[Selection, Arrays, ZeroOneAdamState]:
        """One step: (leaves, what the shared parameters move by, new state).

        Args:
          updates: this rank's gradients, at its own parameters.
          state: from `init`, or the step before.
          target: the shared parameters.
        """
        chosen = select(updates)
        warn_if_reduced(chosen.chosen(), self.base.axis_name)
        self._check_types(state)
        taken = all_finite(chosen.chosen(), self.base.axis_name)
        since = state.count - state.freeze.step
        is_frozen = since >= 0
        is_last = is_frozen & (state.since + 1 >= self.interval(since))
        turns = [
            (~is_frozen, WARMUP_SCOPE, self._warm_up),
            (is_frozen & ~is_last, LOCAL_SCOPE, self._go_on),
        ]
        every = self.base.refresh_every
        if every is None:
            turns += [(is_last, COMPRESSED_SCOPE, self._synchronise)]
        else:
            is_due = state.count + 1 - state.updated >= jnp.asarray(every, jnp.int32)
            turns += [
                (is_last & ~is_due, COMPRESSED_SCOPE, self._synchronise),
                (is_last & is_due, REFRESH_SCOPE, self._refresh),
            ]
        zeros = [jnp.zeros_like(v) for v in chosen.read(state.nu)]
        carry = (zeros, self._with_own(state))
        for condition, scope, run in turns:

            def turn(carry: Moved, run: Any = run, scope: str = scope) -> Moved:
                with jax.named_scope(scope):
                    held = carry[1]
                    if scope == WARMUP_SCOPE and _axes(held) != _axes(state):
                        # Momenta that come in are alike on all ranks, which the
                        # checks would no longer see.
                        held = held._replace(mu=state.mu)
                    moves, new = run(chosen, held, target)
                    return moves, self._with_own(new)

            carry = run_once(taken & condition, turn, carry)
        return chosen, *carry

    def interval(self, since: jax.Array) -> jax.Array:
        """Steps from one synchronisation to the next, `since` the freeze, int32[]."""
        limit = jnp.asarray(self.sync_every, jnp.int32)
        if self.double_every is None:
            return limit
        doublings = jnp.clip(since // jnp.asarray(self.double_every, jnp.int32), 0, 30)
        return jnp.minimum(limit, jnp.left_shift(jnp.int32(1), doublings))

    def _warm_up(
        self, chosen: Selection, state: ZeroOneAdamState, target: Target
    ) -> Moved:
        """Adam on the exact mean, which leaves all ranks alike."""
        work = chosen.working_dtype()
        grads = axis_mean(chosen.widened(), self.base.axis_name)
        mu = self._blend(self._own(chosen, state.mu), grads)
        nu = [
            self.base.b2 * v + (1 - self.base.b2) * g * g
            for v, g in zip(chosen.read(state.nu), grads, strict=True)
        ]
        count = increment(state.count)
        found = directions(mu, nu, self.base.factors(count, count, work))
        norm = sum((jnp.sum(v) for v in nu), jnp.zeros([], work))
        norm = norm / bias_correction(self.base.b2, count, work)
        return target.steps(found), state._replace(
            count=count,
            freeze=self.base.freeze.observe(state.freeze, count, norm),
            updated=count,
            mu=self._each(chosen, mu),
            nu=chosen.state(nu),
        )

    def _go_on(
        self, chosen: Selection, state: ZeroOneAdamState, target: Target
    ) -> Moved:
        """A step of this rank's own; the shared parameters only decay."""
        work = chosen.working_dtype()
        count = increment(state.count)
        mu = self._blend(self._own(chosen, state.mu), chosen.widened())
        factors = self.base.factors(count, state.updated, work)
        found = directions(mu, self.base.raised(chosen, chosen.read(state.nu)), factors)
        rate = jnp.asarray(target.rate, work)
        pairs = zip(
            self._own(chosen, state.drift), found, target.is_decayed, strict=True
        )
        drift = [
            (d - rate * target.decay * d if decays else d) + rate * u
            for d, u, decays in pairs
        ]
        # Made of v, they are alike on all ranks.
        moves = target.steps([jnp.zeros_like(v) for v in chosen.read(state.nu)])
        return moves, state._replace(
            count=count,
            since=state.since + 1,
            rates=state.rates + rate,
            mu=self._each(chosen, mu),
            drift=self._each(chosen, drift),
        )

    def _synchronise(
        self, chosen: Selection, state: ZeroOneAdamState, target: Target
    ) -> Moved:
        """The last step of this rank's own, and the mean of where all have come to."""
        work = chosen.working_dtype()
        moves, state = self._go_on(chosen, state, target)
        nu = chosen.read(state.nu)
        factors = self.base.factors(state.count, state.updated, work)
        drift, mu = self._own(chosen, state.drift), self._own(chosen, state.mu)
        start = Momenta(
            grads=[
                d * (jnp.sqrt(v / factors.v_correction) + factors.eps)
                for d, v in zip(drift, self.base.raised(chosen, nu), strict=True)
            ],
            mu=[],
            errors=self._own(chosen, state.worker_error)
            if self.base.has_feedback
            else [],
            server_error=self.base.server_error_of(state, work),
            nu=nu,
        )
        exchange = self.base.exchange(chosen)
        sent = exchange.send(start, 0.0)
        # What has arrived is no momentum, and needs no correction.
        plain = factors._replace(m_correction=jnp.ones([], work))
        found = exchange.receive(sent.way, nu, start.server_error, plain, None)
        total = jnp.where(state.rates > 0, state.rates, 1)
        mean = [factors.m_correction / total * u for u in found.mu]
        mu = [
            jnp.where(state.rates > 0, new, m) for new, m in zip(mean, mu, strict=True)
        ]
        if self.base.has_feedback:
            worker = own(state.worker_error.tree, self.base.axis_name)
            held = self.base.hold(chosen, sent.worker_error, worker)
            state = state._replace(
                worker_error=PerRank(per_rank(held, self.base.axis_name)),
                server_error=self.base.kept_by_server(state, found.server_error),
            )
        moves = [a - b for a, b in zip(moves, found.moved, strict=True)]
        return moves, state._replace(
            since=jnp.zeros_like(state.since),
            rates=jnp.zeros_like(state.rates),
            mu=self._each(chosen, mu),
            drift=self._each(chosen, [jnp.zeros_like(d) for d in drift]),
        )

    def _refresh(
        self, chosen: Selection, state: ZeroOneAdamState, target: Target
    ) -> Moved:
        """A synchronisation, and v from this step's gradients of all ranks."""
        work = chosen.working_dtype()
        moves, state = self._synchronise(chosen, state, target)
        grads = axis_mean(chosen.widened(), self.base.axis_name)
        stands_for = (state.count - state.updated).astype(work)
        b2 = jnp.power(jnp.asarray(self.base.b2, work), stands_for)
        nu = [
            b2 * v + (1 - b2) * g * g
            for v, g in zip(chosen.read(state.nu), grads, strict=True)
        ]
        return moves, state._replace(updated=state.count, nu=chosen.state(nu))

    def _blend(self, mu: Arrays, grads: Arrays) -> Arrays:
        return [
            self.base.b1 * m + (1 - self.base.b1) * g
            for m, g in zip(mu, grads, strict=True)
        ]

    def _own(self, chosen: Selection, state: PerRank) -> Arrays:
        """This rank's arrays of a tree."""
        nodes = chosen.read(own(state.tree, self.base.axis_name))
        return [load(node, chosen.working_dtype()) for node in nodes]

    def _each(self, chosen: Selection, values: Arrays) -> PerRank:
        return PerRank(per_rank(chosen.state(values), self.base.axis_name))

    def _with_own(self, state: ZeroOneAdamState) -> ZeroOneAdamState:
        """The state, what differs between ranks marked so: alike in all branches."""
        kept = ("mu", "drift", "worker_error", "server_error")
        return state._replace(
            **{name: vary(getattr(state, name), self.base.axis_name) for name in kept}
        )

    def _check_types(self, state: ZeroOneAdamState) -> None:
        """Raises TypeError where the types along the axis cannot be right."""
        names = set(axis_names(self.base.axis_name))
        if any(names & varying_axes(x) for x in jax.tree.leaves(state.mu)):
            raise TypeError(
                "`zero_one_adam` needs `shard_map(..., check_vma=False)`: its checks "
                "cannot see that the first moment, which each rank has for its own, is "
                "alike on all ranks during the warm-up."
            )


def _axes(state: ZeroOneAdamState) -> list[frozenset[str]]:
    """Axes that each array of the first moment is held to vary over."""
    return [varying_axes(x) for x in jax.tree.leaves(state.mu)]
