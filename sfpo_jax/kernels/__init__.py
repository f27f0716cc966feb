"""Array primitives the compressors and transformations are made of.

Each function has a jnp implementation, and some a native one beside it, which runs
where its library is loaded. They know nothing of axes, optimizers or payloads.
"""

from sfpo_jax.kernels._adamw8bit import Adamw8bitResult as Adamw8bitResult
from sfpo_jax.kernels._adamw8bit import AdamwNumbers as AdamwNumbers
from sfpo_jax.kernels._adamw8bit import adam_direction as adam_direction
from sfpo_jax.kernels._adamw8bit import adamw8bit_directions as adamw8bit_directions
from sfpo_jax.kernels._adamw8bit import adamw8bit_parameters as adamw8bit_parameters
from sfpo_jax.kernels._bits import pack_bits as pack_bits
from sfpo_jax.kernels._bits import packed_size as packed_size
from sfpo_jax.kernels._bits import unpack_bits as unpack_bits
from sfpo_jax.kernels._hash import Seed as Seed
from sfpo_jax.kernels._hash import make_seed as make_seed
from sfpo_jax.kernels._hash import random_bits as random_bits
from sfpo_jax.kernels._hash import random_units as random_units
from sfpo_jax.kernels._hash import round_at_random as round_at_random
from sfpo_jax.kernels._library import Library as Library
from sfpo_jax.kernels._library import find_library as find_library
from sfpo_jax.kernels._library import load_libraries as load_libraries
from sfpo_jax.kernels._library import native_platforms as native_platforms
from sfpo_jax.kernels._native import use_twins as use_twins
from sfpo_jax.kernels._onebit import AdamFactors as AdamFactors
from sfpo_jax.kernels._onebit import onebit_apply as onebit_apply
from sfpo_jax.kernels._onebit import onebit_directions as onebit_directions
from sfpo_jax.kernels._onebit import raised_variance as raised_variance
from sfpo_jax.kernels._pool import NativePool as NativePool
from sfpo_jax.kernels._pool import PoolError as PoolError
from sfpo_jax.kernels._pool import PoolMemoryError as PoolMemoryError
from sfpo_jax.kernels._pool import PoolNumbers as PoolNumbers
from sfpo_jax.kernels._pool import pool_problem as pool_problem
from sfpo_jax.kernels._quantized import Quantized as Quantized
from sfpo_jax.kernels._quantized import block_size as block_size
from sfpo_jax.kernels._quantized import dequantize as dequantize
from sfpo_jax.kernels._quantized import is_quantized as is_quantized
from sfpo_jax.kernels._quantized import is_worth_quantizing as is_worth_quantizing
from sfpo_jax.kernels._quantized import quantize as quantize
from sfpo_jax.kernels._rows import Bucket as Bucket
from sfpo_jax.kernels._rows import Piece as Piece
from sfpo_jax.kernels._rows import RowGroup as RowGroup
from sfpo_jax.kernels._select import kept_count as kept_count
from sfpo_jax.kernels._select import select_largest as select_largest
from sfpo_jax.kernels._select import (
    select_largest_of_each as select_largest_of_each,
)
from sfpo_jax.kernels._signs import EncodedSigns as EncodedSigns
from sfpo_jax.kernels._signs import ServedSigns as ServedSigns
from sfpo_jax.kernels._signs import decode_signs as decode_signs
from sfpo_jax.kernels._signs import encode_signs as encode_signs
from sfpo_jax.kernels._signs import mean_magnitude as mean_magnitude
from sfpo_jax.kernels._signs import serve_signs as serve_signs
from sfpo_jax.kernels._signs import with_sign as with_sign
from sfpo_jax.kernels._sparsify import Sparsified as Sparsified
from sfpo_jax.kernels._sparsify import sparsify_leaves as sparsify_leaves
from sfpo_jax.kernels._threshold import Thresholds as Thresholds
from sfpo_jax.kernels._threshold import (
    magnitude_thresholds as magnitude_thresholds,
)
