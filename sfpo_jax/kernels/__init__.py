"""Array primitives the compressors and transformations are made of.

Each function is the jnp implementation of one operation. They know nothing of axes,
optimizers or payloads.
"""

from sfpo_jax.kernels._bits import pack_bits as pack_bits
from sfpo_jax.kernels._bits import packed_size as packed_size
from sfpo_jax.kernels._bits import unpack_bits as unpack_bits
from sfpo_jax.kernels._select import kept_count as kept_count
from sfpo_jax.kernels._select import select_largest as select_largest
from sfpo_jax.kernels._select import (
    select_largest_of_each as select_largest_of_each,
)
