"""The compressed mean of gradients or momenta, and the directions that follow.

Two ways to the same numbers: fused kernels that read each leaf once, for signs in
float32, and array operations over rows, for every compressor and dtype.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sfpo_jax._validate import Scalar
from sfpo_jax.collectives import AxisName, Bucket, exchange_signs, reduce_leaves
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
    mu: Arrays
    errors: Arrays  # what the workers lost; [] without error feedback
    server_error: Any  # of each bucket's groups; None without
    nu: Arrays


class Averaged(NamedTuple):
    """What it leaves."""

    moved: Arrays  # directions, or new parameters where a target was given
    mu: Arrays
    payload: Any  # the mean as it came off the wire, of each bucket's groups
    worker_error: Arrays  # [] without error feedback
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
            found = exchange_signs(
                self.buckets,
                leaves,
                relaxation=self._relaxation(),
                axis_name=self.axis_name,
                worker_error=errors,
                server_error=server_error,
            )
            values = self._decode_signs(found.payload, leaves, [])
            return Mean(values, found.worker_error, found.server_error)
        if errors:
            leaves = [x + e for x, e in zip(leaves, errors, strict=True)]
        live = [bucket.live() for bucket in self.buckets]
        reduced = reduce_leaves(
            self.compressor, self.buckets, leaves, server_error, live, self.axis_name
        )
        errors = reduced.worker_error if errors else []
        return Mean(reduced.mean, errors, reduced.server_error)

    def average(
        self, start: Momenta, b1: Scalar, factors: AdamFactors, target: Target | None
    ) -> Averaged:
        """The mean over the axis of b1 m + (1 - b1) g + e, and where it leads."""
        if start.nu and self.is_fused(start.nu[0].dtype):
            return self._average_signs(start, b1, factors, target)
        found = self._average_rows(start, b1, factors)
        if target is None:
            return found
        return found._replace(moved=target.moved(found.moved))

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

    def _relaxation(self) -> float:
        assert self.compressor.relaxation is not None
        return self.compressor.relaxation

    def _decode_signs(self, payload: Any, like: Arrays, nu: Arrays) -> Arrays:
        values = list(like)
        for bucket, groups in zip(self.buckets, payload, strict=True):
            signs, scales = [x.signs for x in groups], [x.scales for x in groups]
            shapes = [x.shape for x in bucket.of(like)]
            found = decode_signs(bucket, signs, scales, shapes, bucket.of(nu))
            for leaf, value in zip(bucket.leaves, found, strict=True):
                values[leaf] = value
        return values

    def _average_signs(
        self, start: Momenta, b1: Scalar, factors: AdamFactors, target: Target | None
    ) -> Averaged:
        mean = exchange_signs(
            self.buckets,
            start.grads,
            relaxation=self._relaxation(),
            axis_name=self.axis_name,
            momentum=start.mu,
            b1=b1,
            worker_error=start.errors,
            server_error=start.server_error,
            variance=start.nu,
        )
        is_in_place = target is not None and all(
            p.dtype == jnp.float32 for p in target.params
        )
        moved, mu = list(start.nu), list(start.nu)
        for bucket, groups in zip(self.buckets, mean.payload, strict=True):
            signs, scales = [x.signs for x in groups], [x.scales for x in groups]
            update = (bucket, signs, scales, bucket.of(start.nu))
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
        return Averaged(moved, mu, mean.payload, mean.worker_error, mean.server_error)

    def _average_rows(
        self, start: Momenta, b1: Scalar, factors: AdamFactors
    ) -> Averaged:
        total = [
            b1 * m + (1 - b1) * g for m, g in zip(start.mu, start.grads, strict=True)
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
        raised = [
            [raised_variance(x, factors.nu_floor) for x in groups]
            for groups in variances
        ]
        nu = unpack(self.buckets, raised, [v.shape for v in start.nu])
        return Averaged(
            directions(reduced.mean, nu, factors),
            reduced.mean,
            reduced.payload,
            reduced.worker_error if start.errors else [],
            reduced.server_error,
        )


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
