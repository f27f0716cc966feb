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
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sfpo_jax.collectives import (
    all_finite,
    axis_mean,
    axis_names,
    axis_size,
    vary,
    varying_axes,
)
from sfpo_jax.kernels import AdamFactors, make_seed, raised_variance
from sfpo_jax.transforms._exchange import (
    Arrays,
    Exchange,
    Momenta,
    directions,
    unpack,
)
from sfpo_jax.transforms._freeze import FreezeState
from sfpo_jax.transforms._in_place import Target
from sfpo_jax.transforms._moments import (
    bias_correction,
    load,
    next_variance,
    store,
)
from sfpo_jax.transforms._onebit_state import OnebitArguments, ScaleByOnebitAdamState
from sfpo_jax.transforms._phase import SCOPES, Phase
from sfpo_jax.transforms._run_once import run_once
from sfpo_jax.transforms._state import (
    PerRank,
    Selection,
    increment,
    own,
    per_rank,
    select,
    warn_if_reduced,
)

Carry = tuple[Arrays, "ScaleByOnebitAdamState"]


def _since_freeze(state: ScaleByOnebitAdamState) -> jax.Array:
    """Steps since the freeze, negative before it, int32[]."""
    return state.count - state.freeze.step


@dataclass(frozen=True)
class OnebitAdam(OnebitArguments):
    """The algorithm; `onebit_adam` is its public face."""

    def step(
        self,
        updates: optax.Updates,
        state: ScaleByOnebitAdamState,
        target: Target | None = None,
        phase: Phase | None = None,
    ) -> tuple[Selection, Arrays, ScaleByOnebitAdamState, jax.Array]:
        """One step: (leaves, directions u, new state, whether it was taken).

        Args:
          updates: this rank's gradients.
          state: from `init`, or the step before.
          target: what is to move; its new parameters come in place of the directions.
          phase: which phase this step is, where the caller has decided, and has agreed
            over the axis that all gradients are finite.
        """
        chosen = select(updates)
        work = chosen.working_dtype()
        warn_if_reduced(chosen.chosen(), self.axis_name)
        self._check_packed(state)

        def run(carry: Carry, phase: Phase) -> Carry:
            with jax.named_scope(SCOPES[phase]):
                start, held = carry
                moving = None
                if target is not None:
                    # Parameters read from outside the loop would be kept beside those
                    # that it writes, by copies.
                    moving = target._replace(params=start)
                if phase == "warmup" and self.is_packed and _axes(held) != _axes(state):
                    # The first moment that lies there is alike on all ranks, which the
                    # checks would no longer see.
                    held = held._replace(worker_error=state.worker_error)
                way, held = self.send(chosen, held, phase)
                found, new = self.receive(chosen, way, held, phase, moving)
                return found, self._with_own_errors(new)

        warmup = partial(run, phase="warmup")
        compressed = partial(run, phase="compressed")

        if target is None:
            # Made of v, they vary over the same axes as what will take their place.
            start = [jnp.zeros_like(v) for v in _load(work, chosen.read(state.nu))]
        else:
            start = target.params
        carry = (start, self._with_own_errors(state))
        if phase is not None:
            found, state = (warmup if phase == "warmup" else compressed)(carry)
            return chosen, found, state, jnp.bool_(True)
        taken = all_finite(chosen.chosen(), self.axis_name)
        carry = run_once(taken & ~state.compresses_next, warmup, carry)
        found, state = run_once(taken & state.compresses_next, compressed, carry)
        return chosen, found, state, taken

    def send(
        self, chosen: Selection, state: ScaleByOnebitAdamState, phase: Phase
    ) -> tuple[Any, ScaleByOnebitAdamState]:
        """(what is on its way, state): the first half of a step.

        The warm-up's exact mean of the gradients; afterwards the momentum, sent.
        """
        if phase == "warmup":
            return axis_mean(chosen.widened(), self.axis_name), state
        return self._send(chosen, state)

    def receive(
        self,
        chosen: Selection,
        way: Any,
        state: ScaleByOnebitAdamState,
        phase: Phase,
        target: Target | None = None,
    ) -> tuple[Arrays, ScaleByOnebitAdamState]:
        """(directions, or a target's new parameters; new state): the second half.

        Args:
          chosen: the leaves, of which only shapes and dtypes are read.
          way: of `send`.
          state: of `send`.
          phase: as there.
          target: what is to move.
        """
        if phase == "compressed":
            return self._receive(chosen, way, state, target)
        found, state = self._warmup(chosen, way, state)
        return (found if target is None else target.moved(found)), state

    def _warmup(
        self, chosen: Selection, grads: Arrays, state: ScaleByOnebitAdamState
    ) -> tuple[Arrays, ScaleByOnebitAdamState]:
        """Adam, bias-corrected, on the exact mean; after the freeze, a refresh of v."""
        b1, work = self.b1, chosen.working_dtype()
        since = _since_freeze(state)
        is_refresh = since >= 0
        count = increment(state.count)
        worker = own(state.worker_error.tree, self.axis_name)
        mu = self._momentum(chosen, state, worker)
        mu = [b1 * m + (1 - b1) * g for m, g in zip(mu, grads, strict=True)]
        seed = make_seed(count)
        # It stands for all steps since v was last brought up to date.
        stands_for = jnp.maximum(count - self._last_refresh(state), 1).astype(work)
        b2 = jnp.power(jnp.asarray(self.b2, work), stands_for)
        b2, fresh = (
            jnp.asarray(jnp.where(is_refresh, later, first), work)
            for later, first in ((b2, self.b2), (1 - b2, 1 - self.b2))
        )
        pairs = [
            next_variance(v, g, b2, seed, fresh)
            for v, g in zip(chosen.read(state.nu), grads, strict=True)
        ]
        nu = [v for v, _ in pairs]
        variances = nu
        if self.refresh_every is not None:
            variances = [
                jnp.where(is_refresh, r, v)
                for r, v in zip(self.raised(chosen, nu), nu, strict=True)
            ]
        found = directions(mu, variances, self.factors(count, count, work))
        correction = bias_correction(self.b2, count, work)
        norm = sum((jnp.sum(v) for v in nu), jnp.zeros([], work)) / correction
        freeze = self.freeze.observe(state.freeze, count, norm)
        freeze = jax.tree.map(
            lambda new, old: jnp.where(is_refresh, old, new), freeze, state.freeze
        )
        # A dense step out of turn, which others that share the step asked for, is as
        # good as a freeze: v is up to date, and so is what is counted from there.
        is_due = self._is_due(since)
        freeze = freeze._replace(
            step=jnp.where(is_refresh & ~is_due, count, freeze.step)
        )
        if self.is_packed:
            held = per_rank(self.hold(chosen, mu, worker), self.axis_name)
            state = state._replace(worker_error=PerRank(held))
        else:
            state = state._replace(mu=self.hold(chosen, mu, state.mu))
        return found, state._replace(
            count=count,
            freeze=freeze,
            compresses_next=self._compresses(count, freeze),
            nu=chosen.state([node for _, node in pairs]),
        )

    def _momentum(
        self, chosen: Selection, state: ScaleByOnebitAdamState, worker: Any
    ) -> Arrays:
        """m before a dense step."""
        work = chosen.working_dtype()
        if not self.is_packed:
            return _load(work, chosen.read(state.mu))
        held = _load(work, chosen.read(worker))
        # Once compressed, it is no longer where the warm-up had it.
        nu = _load(work, chosen.read(state.nu))
        sent = _load(work, self.exchange(chosen).decode(state.mu, nu))
        is_sent = _since_freeze(state) > 0
        return [jnp.where(is_sent, m, h) for m, h in zip(sent, held, strict=True)]

    def _is_due(self, since: jax.Array) -> jax.Array:
        """Whether the step `since` the freeze is a dense one in turn, bool[]."""
        if self.refresh_every is None:
            return jnp.bool_(False)
        return (since >= 0) & ((since + 1) % self.refresh_every == 0)

    def _send(
        self, chosen: Selection, state: ScaleByOnebitAdamState
    ) -> tuple[Any, ScaleByOnebitAdamState]:
        """The momentum, with what earlier steps lost."""
        work = chosen.working_dtype()
        exchange = self.exchange(chosen)
        nu = _load(work, chosen.read(state.nu))
        worker = own(state.worker_error.tree, self.axis_name)
        has_errors = self.has_feedback or self.is_packed
        errors = _load(work, chosen.read(worker)) if has_errors else []
        if self.is_packed:
            is_first = state.count == state.freeze.step
            mu = _load(work, exchange.decode(state.mu, nu))
            mu = [jnp.where(is_first, e, m) for m, e in zip(mu, errors, strict=True)]
            errors = [jnp.where(is_first, 0, e) for e in errors]
        else:
            mu = _load(work, chosen.read(state.mu))
        start = Momenta(
            grads=chosen.widened(),
            mu=mu,
            errors=errors if self.has_feedback else [],
            server_error=self.server_error_of(state, work),
            nu=nu,
        )
        sent = exchange.send(start, self.b1)
        if self.has_feedback:
            held = self.hold(chosen, sent.worker_error, worker)
            state = state._replace(worker_error=PerRank(per_rank(held, self.axis_name)))
        return sent.way, state

    def _receive(
        self,
        chosen: Selection,
        way: Any,
        state: ScaleByOnebitAdamState,
        target: Target | None,
    ) -> tuple[Arrays, ScaleByOnebitAdamState]:
        """Adam with v frozen, by the mean of the momenta."""
        work = chosen.working_dtype()
        nu = _load(work, chosen.read(state.nu))
        count = increment(state.count)
        factors = self.factors(count, self._last_refresh(state), work)
        found = self.exchange(chosen).receive(
            way, nu, self.server_error_of(state, work), factors, target
        )
        if self.has_feedback:
            kept = self.kept_by_server(state, found.server_error)
            state = state._replace(server_error=kept)
        if self.is_packed:
            mu = found.payload
        else:
            mu = self.hold(chosen, found.mu, state.mu)
        compresses_next = self._compresses(count, state.freeze)
        return found.moved, state._replace(
            count=count, compresses_next=compresses_next, mu=mu
        )

    def exchange(self, chosen: Selection) -> Exchange:
        buckets = self.buckets(chosen, axis_size(self.axis_name))
        return Exchange(self.compressor, buckets, self.axis_name)

    def server_error_of(self, state: Any, work: Any) -> Any:
        """This rank's, of each bucket's groups; None without feedback."""
        if not self.has_feedback:
            return None
        held = own(state.server_error.tree, self.axis_name)
        return [_load(work, rows) for rows in held]

    def kept_by_server(self, state: Any, errors: Any) -> PerRank:
        """Errors of the server as a state holds them: undoes `server_error_of`."""
        held = jax.tree.map(store, errors, own(state.server_error.tree, self.axis_name))
        return state.server_error._replace(tree=per_rank(held, self.axis_name))

    def raised(self, chosen: Selection, nu: Arrays) -> Arrays:
        """v, where not 0 at least `nu_floor` of the mean of its block."""
        buckets = self.buckets(chosen, axis_size(self.axis_name))
        rows = [
            [raised_variance(x, self.nu_floor) for x in bucket.pack(nu)]
            for bucket in buckets
        ]
        return unpack(buckets, rows, chosen.shapes())

    def _compresses(self, count: jax.Array, freeze: FreezeState) -> jax.Array:
        """Whether the step after `count` sends the momentum compressed, bool[]."""
        since = count - freeze.step
        return (since >= 0) & ~self._is_due(since)

    def factors(
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

    @staticmethod
    def hold(chosen: Selection, values: Arrays, old: Any) -> Any:
        """A state tree of `values`, kept as those of `old` are."""
        held = chosen.read(old)
        return chosen.state([store(v, o) for v, o in zip(values, held, strict=True)])


def _load(dtype: Any, nodes: Any) -> Arrays:
    return [load(node, dtype) for node in nodes]


def _axes(state: ScaleByOnebitAdamState) -> list[frozenset[str]]:
    """Axes that each array of the worker error is held to vary over."""
    return [varying_axes(x) for x in jax.tree.leaves(state.worker_error)]
