"""Memory planned before anything runs: deviceless plans and budgets."""

from sfpo_jax.memory._batch_size import max_batch_size as max_batch_size
from sfpo_jax.memory._cache import cache_folder as cache_folder
from sfpo_jax.memory._command import add_plan_arguments as add_plan_arguments
from sfpo_jax.memory._command import parse_mesh as parse_mesh
from sfpo_jax.memory._command import run_plan as run_plan
from sfpo_jax.memory._compile import CompileError as CompileError
from sfpo_jax.memory._devices import DEVICES as DEVICES
from sfpo_jax.memory._devices import Device as Device
from sfpo_jax.memory._devices import find_device as find_device
from sfpo_jax.memory._fits import DoesNotFitError as DoesNotFitError
from sfpo_jax.memory._fits import assert_fits as assert_fits
from sfpo_jax.memory._flops import count_flops as count_flops
from sfpo_jax.memory._plan import Plan as Plan
from sfpo_jax.memory._planner import plan as plan
from sfpo_jax.memory._recompute import plan_recompute as plan_recompute
from sfpo_jax.memory._recompute_plan import BudgetError as BudgetError
from sfpo_jax.memory._recompute_plan import RecomputePlan as RecomputePlan
from sfpo_jax.memory._recomputed import Keep as Keep
from sfpo_jax.memory._recomputed import Recorder as Recorder
from sfpo_jax.memory._recomputed import recomputed as recomputed
from sfpo_jax.memory._topology import MissingCompilerError as MissingCompilerError
from sfpo_jax.memory._topology import compiler_problem as compiler_problem
from sfpo_jax.memory._topology import install_command as install_command
from sfpo_jax.memory._topology import planning_mesh as planning_mesh
