"""A compressed mean without its transfers: what one device computes, stage by stage.

Between the stages of a real mean lie an all-to-all and an all-gather, across which XLA
fuses nothing; to time them, they have to be programs of their own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sfpo_jax.collectives._axis import all_finite
from sfpo_jax.collectives._buckets import plan_buckets
from sfpo_jax.collectives._two_phase import decode_rows, encode_rows, serve_rows
from sfpo_jax.compression import Compressor, SignPayload
from sfpo_jax.kernels import Bucket, decode_signs, encode_signs, serve_signs


class CodecStages(NamedTuple):
    """The stages of the mean of one float32[entries].

    Attributes:
      send: (x, worker error) -> (sent, worker error), `sent` with its payloads.
      serve: (sent, server error) -> (reply, server error). The payload of a device
        stands for those it would receive, which are as large.
      receive: (sent, reply) -> the mean, float32[entries].
      server_error: x -> the first server error, zeros.
    """

    send: Callable[[jax.Array, jax.Array], Any]
    serve: Callable[[Any, Any], Any]
    receive: Callable[[Any, Any], jax.Array]
    server_error: Callable[[jax.Array], Any]


def codec_stages(compressor: Compressor, entries: int, ranks: int) -> CodecStages:
    """The stages for `ranks` devices, as `compressed_mean` runs them.

    Args:
      compressor: what would go on the wire.
      entries: size of the only leaf, at least 1.
      ranks: devices along the axis.
    """
    (bucket,) = plan_buckets([entries], compressor, ranks, entries)
    sizes = [(group.rows // ranks, group.width) for group in bucket.groups]

    def server_error(x: jax.Array) -> Any:
        return [jnp.zeros(size, x.dtype) for size in sizes]

    make = _rows if compressor.relaxation is None else _fused
    return CodecStages(*make(compressor, bucket, ranks), server_error)


def _rows(compressor: Compressor, bucket: Bucket, ranks: int) -> Any:
    """By array operations over rows, for every compressor."""
    dtypes = [jnp.float32] * len(bucket.groups)

    def send(x: jax.Array, error: jax.Array) -> Any:
        finite = all_finite([x], None)
        rows = bucket.pack([x + error])
        sent, lost = encode_rows(compressor, rows, bucket.live())
        return (sent, finite[None]), bucket.unpack(lost)[0].reshape(x.shape)

    def serve(sent: Any, error: Any) -> Any:
        mine = [m[: m.shape[0] // ranks] for m in bucket.live()]
        reply, lost = serve_rows(compressor, sent[0], error, mine, ranks, dtypes)
        return reply, list(lost)

    def receive(sent: Any, reply: Any) -> jax.Array:
        del reply  # this device's part; what it receives is as large as what it sent
        mean = decode_rows(compressor, sent[0], bucket.live(), dtypes)
        return bucket.unpack(mean)[0]

    return send, serve, receive


def _fused(compressor: Compressor, bucket: Bucket, ranks: int) -> Any:
    """By the kernels that stand for signs."""
    relaxation = compressor.relaxation
    assert relaxation is not None

    def send(x: jax.Array, error: jax.Array) -> Any:
        finite = all_finite([x], None)
        sent = encode_signs(
            bucket,
            [x],
            momentum=[],
            b1=0.0,
            error=[error],
            variance=[],
            relaxation=relaxation,
        )
        pairs = zip(sent.signs, sent.scales, strict=True)
        payload = [SignPayload(*pair) for pair in pairs]
        return (payload, list(sent.live), finite[None]), sent.error[0]

    def serve(sent: Any, error: Any) -> Any:
        payload, live, _ = sent
        reply = serve_signs(
            bucket,
            [p.signs for p in payload],
            [p.scales for p in payload],
            [m[: m.shape[0] // ranks] for m in live],
            error,
            ranks,
            relaxation,
        )
        return (list(reply.signs), list(reply.scales)), list(reply.error)

    def receive(sent: Any, reply: Any) -> jax.Array:
        del reply
        payload = sent[0]
        return decode_signs(
            bucket,
            [p.signs for p in payload],
            [p.scales for p in payload],
            [(sum(bucket.sizes),)],
            [],
        )[0]

    return send, serve, receive
