"""Rules for the numbers of a run, and what the numbers of a run tell."""

from sfpo_jax.tuning._diagnose import Finding as Finding
from sfpo_jax.tuning._diagnose import diagnose as diagnose
from sfpo_jax.tuning._rules import batch_that_fits as batch_that_fits
from sfpo_jax.tuning._rules import bubble_fraction as bubble_fraction
from sfpo_jax.tuning._rules import check_chunk_size as check_chunk_size
from sfpo_jax.tuning._rules import extend_steps as extend_steps
from sfpo_jax.tuning._rules import layer_transfers as layer_transfers
from sfpo_jax.tuning._rules import optimal_batch_size as optimal_batch_size
from sfpo_jax.tuning._rules import scale_learning_rate as scale_learning_rate
from sfpo_jax.tuning._rules import sparsity_for as sparsity_for
from sfpo_jax.tuning._rules import tuned_chunk_size as tuned_chunk_size
