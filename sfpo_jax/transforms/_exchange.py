"""The compressed mean of gradients or momenta, and the directions that follow.

Two ways to the same numbers: fused kernels that read each leaf once, for signs in
float32, and array operations over rows, for every compressor and dtype.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sfpo_jax._validate import Scalar
from sfpo_jax.collectives import (
    AxisName,
    Bucket,
    reduce_leaves,
    send_signs,
    serve_and_gather,
)
from sfpo_jax.compression import Compressor
from sfpo_jax.kernels import (
    AdamFactors,
    decode_signs,
    onebit_apply,
    onebit_directions,
    raised_variance,
)
from sfpo_jax.transforms._in_place import Target

Arrays = list[jax.Array]


class Mean(NamedTuple):
    """The compressed mean of leaves."""

    leaves: Arrays
    worker_error: Arrays  # [] without error feedback
    server_error: Any


class Momenta(NamedTuple):
    """What a compressed step starts from; lists have one array for each leaf."""

    grads: Arrays
    mu: Arrays  # [] where the gradients are all that is sent
    errors: Arrays  # what the workers lost; [] without error feedback
    server_error: Any  # of each bucket's groups; None without
    nu: Arrays


class Sent(NamedTuple):
    """What is on its way between the halves of a compressed step."""

    way: Any
    worker_error: Arrays  # [] without error feedback


class Averaged(NamedTuple):
    """What a compressed step leaves."""

    moved: Arrays  # directions, or new parameters where a target was given
    mu: Arrays
    payload: Any  # the mean as it came off the wire, of each bucket's groups
    server_error: Any


class Exchange(NamedTuple):
    """How leaves are averaged: the compressor, the layout, the axis."""

    compressor: Compressor
    buckets: tuple[Bucket, ...]
    axis_name: AxisName

    def is_fused(self, dtype: Any) -> bool:
        """Whether the kernels can stand for the compressor in this dtype."""
        return self.compressor.relaxation is not None and dtype == jnp.float32

    def mean(self, leaves: Arrays, errors: Arrays, server_error: Any) -> Mean:
        """The mean over the axis of leaves + errors, all entries live."""
        if self.is_fused(leaves[0].dtype):
            sent = send_signs(
                self.buckets, leaves, worker_error=errors, **self._signs()
            )
            found = serve_and_gather(self.buckets, sent, server_error, **self._signs())
            values = self._decode_signs(found.payload, leaves, [])
            return Mean(values, sent.worker_error, found.server_error)
        if errors:
            leaves = [x + e for x, e in zip(leaves, errors, strict=True)]
        live = [bucket.live() for bucket in self.buckets]
        reduced = reduce_leaves(
            self.compressor, self.buckets, leaves, server_error, live, self.axis_name
        )
        errors = reduced.worker_error if errors else []
        return Mean(reduced.mean, errors, reduced.server_error)

    def send(self, start: Momenta, b1: Scalar) -> Sent:
        """First half of the mean over the axis of b1 m + (1 - b1) g + e, or g + e."""
        if start.nu and self.is_fused(start.nu[0].dtype):
            sent = send_signs(
                self.buckets,
                start.grads,
                momentum=start.mu,
                b1=b1,
                worker_error=start.errors,
                variance=start.nu,
                **self._signs(),
            )
            return Sent(sent._replace(worker_error=[]), sent.worker_error)
        return self._send_rows(start, b1)

    def receive(
        self,
        way: Any,
        nu: Arrays,
        server_error: Any,
        factors: AdamFactors,
        target: Target | None,
    ) -> Averaged:
        """Second half, and where the mean leads.

        Args:
          way: of `send`.
          nu: the variance, as it was there.
          server_error: of each bucket's groups; None without feedback.
          factors: of the update.
          target: what is to move, None for directions.
        """
        if nu and self.is_fused(nu[0].dtype):
            return self._receive_signs(way, nu, server_error, factors, target)
        mean, payload, server_error = way
        raised = [
            [raised_variance(x, factors.nu_floor) for x in bucket.pack(nu)]
            for bucket in self.buckets
        ]
        variances = unpack(self.buckets, raised, [v.shape for v in nu])
        moved = directions(mean, variances, factors)
        if target is not None:
            moved = target.moved(moved)
        return Averaged(moved, mean, payload, server_error)

    def decode(self, payload: Any, nu: Arrays) -> Arrays:
        """The momentum of each leaf that a payload stands for, 0 where nu is."""
        if nu and self.is_fused(nu[0].dtype):
            return self._decode_signs(payload, nu, nu)
        rows = []
        for bucket, groups in zip(self.buckets, payload, strict=True):
            live = [x > 0 for x in bucket.pack(nu)]
            pairs = zip(groups, live, strict=True)
            rows.append([self.compressor.decode(group, mask) for group, mask in pairs])
        return unpack(self.buckets, rows, [v.shape for v in nu])

    def _signs(self) -> dict[str, Any]:
        assert self.compressor.relaxation is not None
        return {
            "relaxation": self.compressor.relaxation,
            "axis_name": self.axis_name,
        }

    def _decode_signs(self, payload: Any, like: Arrays, nu: Arrays) -> Arrays:
        values = list(like)
        for bucket, groups in zip(self.buckets, payload, strict=True):
            signs, scales = [x.signs for x in groups], [x.scales for x in groups]
            shapes = [x.shape for x in bucket.of(like)]
            found = decode_signs(bucket, signs, scales, shapes, bucket.of(nu))
            for leaf, value in zip(bucket.leaves, found, strict=True):
                values[leaf] = value
        return values

    def _receive_signs(
        self,
        way: Any,
        nu: Arrays,
        server_error: Any,
        factors: AdamFactors,
        target: Target | None,
    ) -> Averaged:
        mean = serve_and_gather(self.buckets, way, server_error, **self._signs())
        is_in_place = target is not None and all(
            p.dtype == jnp.float32 for p in target.params
        )
        moved, mu = list(nu), list(nu)
        for bucket, groups in zip(self.buckets, mean.payload, strict=True):
            signs, scales = [x.signs for x in groups], [x.scales for x in groups]
            update = (bucket, signs, scales, bucket.of(nu))
            if target is not None and is_in_place:
                found = onebit_apply(
                    *update,
                    bucket.of(target.params),
                    factors,
                    target.rate,
                    target.decay,
                    bucket.of(target.is_decayed),
                )
            else:
                found = onebit_directions(*update, factors)
            for leaf, new, m in zip(bucket.leaves, *found, strict=True):
                moved[leaf], mu[leaf] = new, m
        if target is not None and not is_in_place:
            moved = target.moved(moved)
        return Averaged(moved, mu, mean.payload, mean.server_error)

    def _send_rows(self, start: Momenta, b1: Scalar) -> Sent:
        """Both phases: what is on its way has arrived."""
        total = start.grads
        if start.mu:
            total = [
                b1 * m + (1 - b1) * g for m, g in zip(start.mu, total, strict=True)
            ]
        if start.errors:
            total = [m + e for m, e in zip(total, start.errors, strict=True)]
        variances = [bucket.pack(start.nu) for bucket in self.buckets]
        reduced = reduce_leaves(
            self.compressor,
            self.buckets,
            total,
            start.server_error,
            [tuple(rows > 0 for rows in groups) for groups in variances],
            self.axis_name,
        )
        way = (reduced.mean, reduced.payload, reduced.server_error)
        return Sent(way, reduced.worker_error if start.errors else [])


def directions(mu: Arrays, nu: Arrays, factors: AdamFactors) -> Arrays:
    """(m / m_correction) / (sqrt(v / v_correction) + eps), 0 where v is 0."""
    found = []
    for m, v in zip(mu, nu, strict=True):
        denominator = jnp.sqrt(v / factors.v_correction) + factors.eps
        found.append(jnp.where(v > 0, m / factors.m_correction / denominator, 0))
    return found


def unpack(
    buckets: tuple[Bucket, ...],
    rows: Sequence[Sequence[jax.Array]],
    shapes: Sequence[tuple[int, ...]],
) -> Arrays:
    """Leaves of `shapes` from the rows of each bucket's groups."""
    flat: dict[int, jax.Array] = {}
    for bucket, groups in zip(buckets, rows, strict=True):
        flat |= zip(bucket.leaves, bucket.unpack(groups), strict=True)
    return [flat[i].reshape(shape) for i, shape in enumerate(shapes)]
