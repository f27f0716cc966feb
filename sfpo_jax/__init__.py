"""sfpo_jax: models that do not fit, and networks too slow for their gradients."""

from sfpo_jax import compression as compression
from sfpo_jax import tuning as tuning
from sfpo_jax.memory import Plan as Plan
from sfpo_jax.memory import assert_fits as assert_fits
from sfpo_jax.memory import max_batch_size as max_batch_size
from sfpo_jax.memory import plan as plan
from sfpo_jax.parallel import LayeredModel as LayeredModel
from sfpo_jax.parallel import Operator as Operator
from sfpo_jax.parallel import column_parallel as column_parallel
from sfpo_jax.parallel import join_hosts as join_hosts
from sfpo_jax.parallel import make_layered_train_step as make_layered_train_step
from sfpo_jax.parallel import make_mesh as make_mesh
from sfpo_jax.parallel import make_train_step as make_train_step
from sfpo_jax.parallel import row_parallel as row_parallel
from sfpo_jax.parallel import shard_sequence as shard_sequence
from sfpo_jax.parallel import stack_layers as stack_layers
from sfpo_jax.schedules import cosine_sparsity as cosine_sparsity
from sfpo_jax.transforms import adamw8bit as adamw8bit
from sfpo_jax.transforms import clip_by_global_norm as clip_by_global_norm
from sfpo_jax.transforms import compressed_mean as compressed_mean
from sfpo_jax.transforms import low_rank_mean as low_rank_mean
from sfpo_jax.transforms import onebit_adam as onebit_adam
from sfpo_jax.transforms import scale_by_onebit_adam as scale_by_onebit_adam
from sfpo_jax.transforms import sfpo as sfpo
from sfpo_jax.transforms import sparsify as sparsify
from sfpo_jax.transforms import state_specs as state_specs
