"""Optax gradient transformations."""

from sfpo_jax.kernels import Quantized as Quantized
from sfpo_jax.kernels import dequantize as dequantize
from sfpo_jax.kernels import is_quantized as is_quantized
from sfpo_jax.kernels import quantize as quantize
from sfpo_jax.transforms._adamw8bit import Adamw8bitState as Adamw8bitState
from sfpo_jax.transforms._adamw8bit import adamw8bit as adamw8bit
from sfpo_jax.transforms._clip import clip_by_global_norm as clip_by_global_norm
from sfpo_jax.transforms._clip import global_norm as global_norm
from sfpo_jax.transforms._compressed_mean import (
    CompressedMeanState as CompressedMeanState,
)
from sfpo_jax.transforms._compressed_mean import compressed_mean as compressed_mean
from sfpo_jax.transforms._drift import local_params as local_params
from sfpo_jax.transforms._drift import takes_local_steps as takes_local_steps
from sfpo_jax.transforms._factored import Factored as Factored
from sfpo_jax.transforms._in_place import (
    InPlaceTransformation as InPlaceTransformation,
)
from sfpo_jax.transforms._in_place import apply_gradients as apply_gradients
from sfpo_jax.transforms._low_rank_mean import LowRankMeanState as LowRankMeanState
from sfpo_jax.transforms._low_rank_mean import low_rank_mean as low_rank_mean
from sfpo_jax.transforms._onebit_adam import onebit_adam as onebit_adam
from sfpo_jax.transforms._onebit_adam import (
    scale_by_onebit_adam as scale_by_onebit_adam,
)
from sfpo_jax.transforms._onebit_state import (
    ScaleByOnebitAdamState as ScaleByOnebitAdamState,
)
from sfpo_jax.transforms._phase import COMPRESSED_SCOPE as COMPRESSED_SCOPE
from sfpo_jax.transforms._phase import PHASE_SCOPES as PHASE_SCOPES
from sfpo_jax.transforms._phase import SCOPES as SCOPES
from sfpo_jax.transforms._phase import WARMUP_SCOPE as WARMUP_SCOPE
from sfpo_jax.transforms._phase import Phase as Phase
from sfpo_jax.transforms._phase import compresses_next as compresses_next
from sfpo_jax.transforms._phase import scope_of as scope_of
from sfpo_jax.transforms._reshare import as_saved as as_saved
from sfpo_jax.transforms._reshare import reshare as reshare
from sfpo_jax.transforms._rounding import Rounding as Rounding
from sfpo_jax.transforms._rounding import make_rounding as make_rounding
from sfpo_jax.transforms._run_once import run_once as run_once
from sfpo_jax.transforms._sfpo import SfpoState as SfpoState
from sfpo_jax.transforms._sfpo import sfpo as sfpo
from sfpo_jax.transforms._sparsify import SparsifyState as SparsifyState
from sfpo_jax.transforms._sparsify import sparsify as sparsify
from sfpo_jax.transforms._staged import StagedTransformation as StagedTransformation
from sfpo_jax.transforms._state import PerRank as PerRank
from sfpo_jax.transforms._state import is_per_rank as is_per_rank
from sfpo_jax.transforms._state import state_specs as state_specs
from sfpo_jax.transforms._zero_one_adam import zero_one_adam as zero_one_adam
from sfpo_jax.transforms._zero_one_core import ZeroOneAdamState as ZeroOneAdamState
