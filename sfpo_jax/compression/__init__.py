"""Compressors: an array to the bytes that go on the wire, and back.

>>> import jax.numpy as jnp
>>> from sfpo_jax import compression
>>> for compressor in (
...     compression.sign(),
...     compression.sparse_sign(0.1),
...     compression.top_k(0.01),
...     compression.int8(),
...     compression.bfloat16(),
...     compression.identity(),
... ):
...     bits = 8 * compressor.payload_bytes(1 << 20) / (1 << 20)
...     print(f"{compressor.name}: {bits:.3f} bits an entry")
sign(2048): 1.016 bits an entry
sparse_sign(0.1, 2048): 0.645 bits an entry
top_k(0.01, 2048): 0.312 bits an entry
int8(256): 8.125 bits an entry
bfloat16: 16.000 bits an entry
identity: 32.000 bits an entry
"""

from sfpo_jax.compression._base import Compressor as Compressor
from sfpo_jax.compression._cast import bfloat16 as bfloat16
from sfpo_jax.compression._cast import identity as identity
from sfpo_jax.compression._int8 import int8 as int8
from sfpo_jax.compression._sign import SignPayload as SignPayload
from sfpo_jax.compression._sign import sign as sign
from sfpo_jax.compression._sparse_sign import sparse_sign as sparse_sign
from sfpo_jax.compression._top_k import top_k as top_k
