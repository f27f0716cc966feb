"""ResNet in Flax NNX (He et al. 2016, arXiv:1512.03385), in the form called v1.5.

v1.5 has the stride of a block in its 3 x 3 convolution; the paper has it in the first
1 x 1, which never reads three quarters of its input. The scale of the last batch norm
of each block begins at zero (Goyal et al. 2017, arXiv:1706.02677), so that every block
begins as the identity. Shapes stand in the names: B images, H x W pixels, C channels,
V classes.

`jax.ad_checkpoint.checkpoint_name` calls the output of each convolution "conv": of what
a block computes, a recompute policy that saves these leaves only cheap arithmetic. What
the stem and each block return is called "block".
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from experiments.models.transformer import Dtype, at_least_one
from experiments.scores import mean_score
from sfpo_jax.collectives import widen

# "none": keep what autodiff would. "full": a block keeps its input. Names: these, too.
Recompute = Literal["none", "full"] | tuple[str, ...]
_EXPANSION = 4  # channels that a block returns, by those inside it


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Sizes of a ResNet of bottleneck blocks; the defaults are ResNet-50.

    Raises:
      ValueError: a size that cannot be, with the key, value and remedy.
    """

    image_size: int = 224
    """Pixels along each side that images are brought to; the network takes any."""
    classes: int = 1000
    """Classes to tell apart."""
    channels: int = 3
    """Channels of an image."""
    width: int = 64
    """Channels inside the blocks of the first stage; each later one doubles them."""
    stages: tuple[int, ...] = (3, 4, 6, 3)
    """Blocks of each stage; a stage halves the sides of its input, the first aside."""
    momentum: float = 0.9
    """Share of the running statistics that a step keeps."""
    dtype: Dtype = "float32"
    """Precision of the convolutions; parameters, statistics and logits stay float32."""

    def __post_init__(self) -> None:
        for name in ("image_size", "classes", "channels", "width"):
            at_least_one(name, getattr(self, name))
        if not self.stages or min(self.stages) < 1:
            raise ValueError(
                f"model.stages must be one count of blocks or more, each at least 1, "
                f"got {self.stages}: ResNet-50 has 3, 4, 6, 3"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"model.momentum must lie in [0, 1), got {self.momentum}: it is the "
                f"share of the statistics that a step keeps"
            )


class ConvNorm(nnx.Module):
    """A convolution without bias, then batch norm."""

    def __init__(
        self,
        config: ResNetConfig,
        c_in: int,
        c_out: int,
        size: int,
        *,
        stride: int = 1,
        scale: float = 1.0,
        rngs: nnx.Rngs,
    ) -> None:
        # Centred whatever the stride, unlike "SAME", as published weights have it.
        edge = (size - 1) // 2
        self.conv = nnx.Conv(
            c_in,
            c_out,
            (size, size),
            strides=stride,
            padding=((edge, edge), (edge, edge)),
            use_bias=False,
            dtype=jnp.dtype(config.dtype),
            kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(
            c_out,
            momentum=config.momentum,
            epsilon=1e-5,
            dtype=jnp.float32,
            scale_init=nnx.initializers.constant(scale),
            rngs=rngs,
        )

    def __call__(self, x_BxHxWxC: jax.Array, is_training: bool) -> jax.Array:
        x_BxHxWxC = checkpoint_name(self.conv(x_BxHxWxC), "conv")
        y_BxHxWxC = self.norm(widen(x_BxHxWxC), use_running_average=not is_training)
        return y_BxHxWxC.astype(x_BxHxWxC.dtype)


class Bottleneck(nnx.Module):
    """relu(shortcut(x) + expand(spatial(reduce(x))))."""

    def __init__(
        self,
        config: ResNetConfig,
        c_in: int,
        c_inside: int,
        *,
        stride: int,
        rngs: nnx.Rngs,
    ) -> None:
        c_out = _EXPANSION * c_inside
        self.reduce = ConvNorm(config, c_in, c_inside, 1, rngs=rngs)
        self.spatial = ConvNorm(config, c_inside, c_inside, 3, stride=stride, rngs=rngs)
        self.expand = ConvNorm(config, c_inside, c_out, 1, scale=0.0, rngs=rngs)
        is_same = stride == 1 and c_in == c_out
        self.shortcut = (
            None
            if is_same
            else ConvNorm(config, c_in, c_out, 1, stride=stride, rngs=rngs)
        )

    def __call__(self, x_BxHxWxC: jax.Array, is_training: bool) -> jax.Array:
        y_BxHxWxC = nnx.relu(self.reduce(x_BxHxWxC, is_training))
        y_BxHxWxC = nnx.relu(self.spatial(y_BxHxWxC, is_training))
        y_BxHxWxC = self.expand(y_BxHxWxC, is_training)
        if self.shortcut is not None:
            x_BxHxWxC = self.shortcut(x_BxHxWxC, is_training)
        return checkpoint_name(nnx.relu(x_BxHxWxC + y_BxHxWxC), "block")


class ResNet(nnx.Module):
    """Images to class logits.

    Args:
      config: the sizes.
      recompute: what the backward pass computes again inside each block. "none":
        nothing. "full": all. Names: all but what `checkpoint_name` calls so.
      rngs: the source of the initial parameters.
    """

    def __init__(
        self, config: ResNetConfig, *, recompute: Recompute = "none", rngs: nnx.Rngs
    ) -> None:
        self.config, self.recompute = config, recompute
        c_in = config.width
        self.stem = ConvNorm(config, config.channels, c_in, 7, stride=2, rngs=rngs)
        blocks = []
        for stage, depth in enumerate(config.stages):
            c_inside = config.width * 2**stage
            for place in range(depth):
                stride = 2 if stage > 0 and place == 0 else 1
                blocks.append(
                    Bottleneck(config, c_in, c_inside, stride=stride, rngs=rngs)
                )
                c_in = _EXPANSION * c_inside
        self.blocks = nnx.List(blocks)
        # Small, as Goyal et al. begin it.
        self.head = nnx.Linear(
            c_in, config.classes, kernel_init=nnx.initializers.normal(0.01), rngs=rngs
        )

    def __call__(self, images_BxHxWxC: jax.Array, *, is_training: bool) -> jax.Array:
        """Float32 logits [B, V] of float images.

        In training the batch norms take the statistics of the batch, and move their
        running ones towards them.

        Raises:
          ValueError: if the images have not the channels of the configuration.
        """
        channels = self.config.channels
        if images_BxHxWxC.shape[3:] != (channels,):
            raise ValueError(
                f"`images` must have the shape [batch, height, width, {channels}], got "
                f"{list(images_BxHxWxC.shape)}: change model.channels, or the images"
            )
        dtype = jnp.dtype(self.config.dtype)
        x_BxHxWxC = nnx.relu(self.stem(images_BxHxWxC.astype(dtype), is_training))
        edges: Any = ((1, 1), (1, 1))  # flax says str, and takes these
        x_BxHxWxC = nnx.max_pool(x_BxHxWxC, (3, 3), (2, 2), edges)
        x_BxHxWxC = checkpoint_name(x_BxHxWxC, "block")
        apply = self._apply(is_training)
        for block in self.blocks:
            x_BxHxWxC = apply(block, x_BxHxWxC)
        x_BxC = widen(x_BxHxWxC).mean(axis=(1, 2))
        return self.head(x_BxC)

    def _apply(self, is_training: bool) -> Callable[[Bottleneck, jax.Array], jax.Array]:
        def apply(block: Bottleneck, x_BxHxWxC: jax.Array) -> jax.Array:
            return block(x_BxHxWxC, is_training)

        if self.recompute == "none":
            return apply
        names = () if self.recompute == "full" else self.recompute
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        return nnx.remat(apply, policy=policy)


class Classifier(NamedTuple):
    """A ResNet as pure functions, for ``make_train_step(..., has_model_state=True)``.

    Attributes:
      init: key -> (parameters, model state), float32; the state is the running
        statistics.
      loss_fn: (parameters, batch, model_state=) -> (mean loss, {"accuracy": share,
        "model_state": new state}); a batch is {"image": float [B, H, W, C], "label":
        int[B]}.
      predict: (parameters, model state, images) -> float32 logits, by the running
        statistics.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    loss_fn: Callable[..., tuple[jax.Array, dict[str, Any]]]
    predict: Callable[[Any, Any, jax.Array], jax.Array]


def make_classifier(
    config: ResNetConfig, *, recompute: Recompute = "none"
) -> Classifier:
    """The functions of a ResNet; arguments are those of `ResNet`."""

    def create(key: jax.Array) -> tuple[Any, Any, Any]:
        net = ResNet(config, recompute=recompute, rngs=nnx.Rngs(key))
        graph, params, stats = nnx.split(net, nnx.Param, nnx.BatchStat)
        return graph, params, stats

    graph, _, _ = nnx.eval_shape(lambda: create(jax.random.key(0)))

    def loss_fn(
        params: Any, batch: Any, *, model_state: Any
    ) -> tuple[jax.Array, dict[str, Any]]:
        # A copy, for the statistics are written within the trace of the gradient.
        net = nnx.merge(graph, params, model_state, copy=True)
        loss, aux = mean_score(net(batch["image"], is_training=True), batch["label"])
        return loss, {**aux, "model_state": nnx.state(net, nnx.BatchStat)}

    def predict(params: Any, model_state: Any, images: jax.Array) -> jax.Array:
        return nnx.merge(graph, params, model_state)(images, is_training=False)

    return Classifier(lambda key: create(key)[1:], loss_fn, predict)
