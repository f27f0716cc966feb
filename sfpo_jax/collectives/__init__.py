"""Moves arrays and payloads over mesh axes; knows no optimizer."""

from sfpo_jax.collectives._axis import AxisName as AxisName
from sfpo_jax.collectives._axis import all_finite as all_finite
from sfpo_jax.collectives._axis import axis_names as axis_names
from sfpo_jax.collectives._axis import axis_size as axis_size
from sfpo_jax.collectives._axis import is_bound as is_bound
from sfpo_jax.collectives._axis import mesh_axis_size as mesh_axis_size
from sfpo_jax.collectives._axis import square_norm as square_norm
from sfpo_jax.collectives._axis import varies as varies
from sfpo_jax.collectives._axis import vary as vary
from sfpo_jax.collectives._axis import varying_axes as varying_axes
from sfpo_jax.collectives._axis import widen as widen
from sfpo_jax.collectives._buckets import plan_buckets as plan_buckets
from sfpo_jax.collectives._mean import axis_mean as axis_mean
from sfpo_jax.collectives._overlap import Overlap as Overlap
from sfpo_jax.collectives._overlap import overlaps as overlaps
from sfpo_jax.collectives._signs import SentSigns as SentSigns
from sfpo_jax.collectives._signs import SignMean as SignMean
from sfpo_jax.collectives._signs import send_signs as send_signs
from sfpo_jax.collectives._signs import serve_and_gather as serve_and_gather
from sfpo_jax.collectives._two_phase import reduce_leaves as reduce_leaves
from sfpo_jax.collectives._two_phase import two_phase_mean as two_phase_mean
from sfpo_jax.collectives._wire import Transfer as Transfer
from sfpo_jax.collectives._wire import transfers as transfers
from sfpo_jax.collectives._wire import wire_bytes as wire_bytes
from sfpo_jax.kernels import Bucket as Bucket
