"""The two-phase mean of signs, fused: leaves are never joined to rows of floats.

The exchange of `_two_phase` with `compression.sign`, whose kernels read momentum,
gradient and errors of each leaf where they lie and write bits for the wire. The mean
comes back as its payload: what follows decodes it while it uses it. Each phase is a
function of its own, so that arithmetic of others can run between them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from sfpo_jax.collectives._axis import AxisName, axis_size
from sfpo_jax.collectives._two_phase import all_gather_rows, all_to_all_rows, own_rows
from sfpo_jax.compression import SignPayload
from sfpo_jax.kernels import Bucket, encode_signs, serve_signs


class SentSigns(NamedTuple):
    """What a rank has received of the first phase; a tuple has one entry a bucket."""

    payload: tuple[tuple[SignPayload, ...], ...]  # all ranks' rows for this one
    live: tuple[tuple[jax.Array, ...], ...]  # uint8, which of this rank's rows' entries
    worker_error: list[jax.Array]  # the leaves' shapes; [] without error feedback


class SignMean(NamedTuple):
    """What the second phase leaves; a tuple has one entry a bucket."""

    payload: tuple[tuple[SignPayload, ...], ...]  # the mean, of each bucket's groups
    server_error: tuple[tuple[jax.Array, ...], ...]  # [rows / N, width] of each group


def send_signs(
    buckets: Sequence[Bucket],
    leaves: Sequence[jax.Array],
    *,
    relaxation: float,
    axis_name: AxisName,
    momentum: Sequence[jax.Array] = (),
    b1: Any = 0.0,
    worker_error: Sequence[jax.Array] = (),
    variance: Sequence[jax.Array] = (),
) -> SentSigns:
    """Phase one: every rank gets its chunk of all ranks' b1 m + (1 - b1) x + e.

    Args:
      buckets: the layout, which covers all leaves.
      leaves: x, float32 arrays of any shapes; so are those below, one for each.
      relaxation: factor on the scales.
      axis_name: the mesh axis, None for one worker.
      momentum: m; without it x + e is sent.
      b1: the share of m.
      worker_error: e, what earlier steps lost.
      variance: entries are live where it is positive; () for all.
    """
    ranks = axis_size(axis_name)
    lost: dict[int, jax.Array] = {}
    payloads, live = [], []
    for bucket in buckets:
        sent = encode_signs(
            bucket,
            bucket.of(leaves),
            momentum=bucket.of(momentum),
            b1=b1,
            error=bucket.of(worker_error),
            variance=bucket.of(variance),
            relaxation=relaxation,
        )
        lost |= zip(bucket.leaves, sent.error, strict=False)
        packed = _payloads(sent.signs, sent.scales)
        payloads.append(tuple(all_to_all_rows(packed, ranks, axis_name)))
        live.append(tuple(own_rows(x, ranks, axis_name) for x in sent.live))
    errors = [lost[i] for i in range(len(leaves))] if worker_error else []
    return SentSigns(tuple(payloads), tuple(live), errors)


def serve_and_gather(
    buckets: Sequence[Bucket],
    sent: SentSigns,
    server_error: Sequence[Sequence[jax.Array]] | None,
    *,
    relaxation: float,
    axis_name: AxisName,
) -> SignMean:
    """Phase two: the mean of each rank's chunk, with its server error, to all ranks.

    Args:
      buckets: the layout.
      sent: from `send_signs`.
      server_error: float32[rows / N, width] of each bucket's groups; None for no
        feedback.
      relaxation: factor on the scales.
      axis_name: the mesh axis, None for one worker.
    """
    ranks = axis_size(axis_name)
    payloads, server = [], []
    for place, bucket in enumerate(buckets):
        received = sent.payload[place]
        reply = serve_signs(
            bucket,
            [x.signs for x in received],
            [x.scales for x in received],
            sent.live[place],
            () if server_error is None else server_error[place],
            ranks,
            relaxation,
        )
        packed = _payloads(reply.signs, reply.scales)
        payloads.append(tuple(all_gather_rows(packed, ranks, axis_name)))
        server.append(reply.error)
    return SignMean(tuple(payloads), tuple(server))


def _payloads(
    signs: Sequence[jax.Array], scales: Sequence[jax.Array]
) -> list[SignPayload]:
    return [SignPayload(*pair) for pair in zip(signs, scales, strict=True)]
