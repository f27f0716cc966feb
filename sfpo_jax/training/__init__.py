"""Training runs from strict, typed configuration files.

Needs the extra `experiments` (PyYAML and tyro; Grain and Pillow where data are read):
`import sfpo_jax` does not bring this package.
"""

from sfpo_jax.training._batch_order import PADDING as PADDING
from sfpo_jax.training._batch_stream import BatchStream as BatchStream
from sfpo_jax.training._batch_stream import check_identity as check_identity
from sfpo_jax.training._build import ConfigError as ConfigError
from sfpo_jax.training._build import build as build
from sfpo_jax.training._build import dotted_keys as dotted_keys
from sfpo_jax.training._checkpoints import Checkpoints as Checkpoints
from sfpo_jax.training._checkpoints import Restored as Restored
from sfpo_jax.training._checkpoints import check_checkpoint as check_checkpoint
from sfpo_jax.training._command_line import exit_on_config_error as exit_on_config_error
from sfpo_jax.training._command_line import load_config as load_config
from sfpo_jax.training._data_iterator import DataIterator as DataIterator
from sfpo_jax.training._data_iterator import ReplayedIterator as ReplayedIterator
from sfpo_jax.training._ema import Ema as Ema
from sfpo_jax.training._ema import EmaState as EmaState
from sfpo_jax.training._evaluation import evaluate as evaluate
from sfpo_jax.training._image_decode import Augment as Augment
from sfpo_jax.training._image_folder import ImageBatch as ImageBatch
from sfpo_jax.training._image_folder import ImageStream as ImageStream
from sfpo_jax.training._image_folder import image_folder as image_folder
from sfpo_jax.training._image_scan import ImageFiles as ImageFiles
from sfpo_jax.training._image_scan import scan_images as scan_images
from sfpo_jax.training._layout_sections import Communication as Communication
from sfpo_jax.training._layout_sections import Compression as Compression
from sfpo_jax.training._layout_sections import Memory as Memory
from sfpo_jax.training._layout_sections import Mesh as Mesh
from sfpo_jax.training._layout_sections import Parallel as Parallel
from sfpo_jax.training._layout_sections import Time as Time
from sfpo_jax.training._loop import Fit as Fit
from sfpo_jax.training._loop import Monitor as Monitor
from sfpo_jax.training._loop import NonFiniteLossError as NonFiniteLossError
from sfpo_jax.training._loop import fit as fit
from sfpo_jax.training._manifest import CheckpointError as CheckpointError
from sfpo_jax.training._manifest import write_atomic as write_atomic
from sfpo_jax.training._metrics import JsonLines as JsonLines
from sfpo_jax.training._metrics import Record as Record
from sfpo_jax.training._metrics import TensorBoard as TensorBoard
from sfpo_jax.training._metrics import check_tensorboard as check_tensorboard
from sfpo_jax.training._optimizer import ONE_BIT as ONE_BIT
from sfpo_jax.training._optimizer import compressed_steps as compressed_steps
from sfpo_jax.training._optimizer import make_dense_optimizer as make_dense_optimizer
from sfpo_jax.training._optimizer import make_learning_rate as make_learning_rate
from sfpo_jax.training._optimizer import make_optimizer as make_optimizer
from sfpo_jax.training._optimizer import sparsity_curve as sparsity_curve
from sfpo_jax.training._optimizer import warmup_steps as warmup_steps
from sfpo_jax.training._sections import Data as Data
from sfpo_jax.training._sections import Optimizer as Optimizer
from sfpo_jax.training._sections import Sparsity as Sparsity
from sfpo_jax.training._sections import Train as Train
from sfpo_jax.training._sections import check_batch as check_batch
from sfpo_jax.training._signals import Stop as Stop
from sfpo_jax.training._signals import stop_on_signals as stop_on_signals
from sfpo_jax.training._text_files import Text as Text
from sfpo_jax.training._text_files import read_text as read_text
from sfpo_jax.training._text_files import split_files as split_files
from sfpo_jax.training._text_windows import TextStream as TextStream
from sfpo_jax.training._text_windows import split_tokens as split_tokens
from sfpo_jax.training._text_windows import text_windows as text_windows
from sfpo_jax.training._yaml import parse_yaml as parse_yaml
from sfpo_jax.training._yaml import read_yaml as read_yaml
from sfpo_jax.training._yaml import write_yaml as write_yaml
