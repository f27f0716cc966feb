"""Models whose large products are shared by the ranks of the mesh axis `op`.

`model.set_attributes(operator=Operator(...))` makes a model's `ColumnLinear` and
`RowLinear` layers work on local shards of their kernels wherever the axis is bound,
and what lies between them on this rank's rows of the sequence. Shapes stand in the
names: B rows of a batch, L tokens, l = ceil(L / op) tokens of a rank, D width.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from sfpo_jax import Operator, column_parallel, row_parallel, tuning


class ColumnLinear(nnx.Linear):
    """A dense layer that gives each rank some features of the whole sequence."""

    operator: Operator | None = None

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        if self.operator is None:
            return super().__call__(inputs, out_sharding)
        x, kernel, bias = _operands(self, inputs)
        return column_parallel(x, kernel, bias, self.operator)


class RowLinear(nnx.Linear):
    """A dense layer that takes these back to all features of each rank's tokens."""

    operator: Operator | None = None

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        if self.operator is None:
            return super().__call__(inputs, out_sharding)
        x, kernel, bias = _operands(self, inputs)
        return row_parallel(x, kernel, bias, self.operator)


def _operands(layer: nnx.Linear, inputs: jax.Array) -> Any:
    bias = None if layer.bias is None else layer.bias[...]
    return layer.promote_dtype((inputs, layer.kernel[...], bias), dtype=layer.dtype)


class Sizes(Protocol):
    """What `check_operator` reads of a model's configuration."""

    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def mlp_width(self) -> int: ...
    @property
    def tokens(self) -> int: ...


def check_operator(sizes: Sizes, operator: Operator, op_size: int) -> None:
    """Refuses a model that the ranks of `op` cannot share.

    Raises:
      ValueError: sizes that `op_size` does not divide, fewer tokens than pieces, or
        numbers that `sfpo_jax.tuning.check_chunk_size` refuses; with key and remedy.
    """
    tuning.check_chunk_size(operator.chunk_size, operator.prefetch_depth, op_size)
    for name in ("heads", "width", "mlp_width"):
        value = getattr(sizes, name)
        if value % op_size:
            raise ValueError(
                f"model.{name} must be a multiple of parallel.mesh.op, got {value} and "
                f"{op_size}: the ranks take equal shares, choose a divisor of {value}"
            )
    rows = -(-sizes.tokens // op_size)
    if rows * op_size < operator.chunk_size:
        raise ValueError(
            f"parallel.operator.chunk_size must be at most the tokens of a sequence, "
            f"got {operator.chunk_size} and {sizes.tokens}: lower it to "
            f"{rows * op_size}"
        )


def operator_specs(model: Any, axis_name: str = "op") -> Any:
    """How the parameters are cut over the axis.

    Args:
      model: with parameters or, by `nnx.eval_shape`, with their shapes.
      axis_name: the mesh axis.

    Returns:
      A tree like the parameters of `nnx.split(model)`, of PartitionSpecs: the columns
      of a `ColumnLinear` and its bias, the rows of a `RowLinear`; else nothing.
    """
    columns, rows = set(), set()
    for path, module in nnx.iter_modules(model):
        if isinstance(module, ColumnLinear):
            columns.add(path)
        elif isinstance(module, RowLinear):
            rows.add(path)

    def spec(path: tuple[Any, ...]) -> PartitionSpec:
        layer, name = path[:-1], path[-1]
        if layer in columns:
            is_kernel = name == "kernel"
            return PartitionSpec(*((None, axis_name) if is_kernel else (axis_name,)))
        if layer in rows and name == "kernel":
            return PartitionSpec(axis_name, None)
        return PartitionSpec()

    flat = nnx.to_flat_state(nnx.split(model)[1])
    return nnx.from_flat_state([(p, leaf.replace(spec(p))) for p, leaf in flat])


def rank_key(key: jax.Array, operator: Operator | None) -> jax.Array:
    """A key of this rank's own, since its tokens are others than another rank's."""
    if _size(operator) == 1:
        return key
    assert operator is not None
    return jax.random.fold_in(key, lax.axis_index(operator.axis_name))


def first_token(x_BxlxD: jax.Array, operator: Operator | None) -> jax.Array:
    """The sequence's first token, [B, D], on all ranks."""
    x_BxD = x_BxlxD[:, 0]
    if _size(operator) == 1:
        return x_BxD
    assert operator is not None
    is_first = lax.axis_index(operator.axis_name) == 0
    return lax.psum(jnp.where(is_first, x_BxD, 0), operator.axis_name)


def mean_token(x_BxlxD: jax.Array, tokens: int, operator: Operator | None) -> jax.Array:
    """The mean of the sequence's `tokens` tokens, [B, D], on all ranks."""
    if _size(operator) == 1:
        return x_BxlxD.mean(axis=1)
    assert operator is not None
    length = x_BxlxD.shape[1]
    places = lax.axis_index(operator.axis_name) * length + jnp.arange(length)
    x_BxlxD = jnp.where((places < tokens)[None, :, None], x_BxlxD, 0)
    return lax.psum(x_BxlxD.sum(axis=1), operator.axis_name) / tokens


def _size(operator: Operator | None) -> int:
    return 1 if operator is None else operator.size()
