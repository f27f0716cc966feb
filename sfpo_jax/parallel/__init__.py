"""Meshes and training steps."""

from sfpo_jax.parallel._agreement import checksum as checksum
from sfpo_jax.parallel._hosts import Hosts as Hosts
from sfpo_jax.parallel._hosts import current_hosts as current_hosts
from sfpo_jax.parallel._join import is_launched as is_launched
from sfpo_jax.parallel._join import join_hosts as join_hosts
from sfpo_jax.parallel._late_step import check_staleness as check_staleness
from sfpo_jax.parallel._launch import add_launch_arguments as add_launch_arguments
from sfpo_jax.parallel._launch import run_launch as run_launch
from sfpo_jax.parallel._layered_model import LayeredModel as LayeredModel
from sfpo_jax.parallel._layered_model import stack_layers as stack_layers
from sfpo_jax.parallel._layered_step import LayeredTrainStep as LayeredTrainStep
from sfpo_jax.parallel._layered_step import (
    make_layered_train_step as make_layered_train_step,
)
from sfpo_jax.parallel._links import Links as Links
from sfpo_jax.parallel._links import find_links as find_links
from sfpo_jax.parallel._links_command import add_links_arguments as add_links_arguments
from sfpo_jax.parallel._links_command import run_links as run_links
from sfpo_jax.parallel._make_train_step import make_train_step as make_train_step
from sfpo_jax.parallel._mesh import make_mesh as make_mesh
from sfpo_jax.parallel._offload import Offload as Offload
from sfpo_jax.parallel._operator import Operator as Operator
from sfpo_jax.parallel._operator import column_parallel as column_parallel
from sfpo_jax.parallel._operator import row_parallel as row_parallel
from sfpo_jax.parallel._operator import shard_sequence as shard_sequence
from sfpo_jax.parallel._probe import probe_codecs as probe_codecs
from sfpo_jax.parallel._probe import probe_link as probe_link
from sfpo_jax.parallel._sharding import shard_axis as shard_axis
from sfpo_jax.parallel._step import Step as Step
from sfpo_jax.parallel._step import TrainState as TrainState
from sfpo_jax.parallel._train_step import TrainStep as TrainStep
