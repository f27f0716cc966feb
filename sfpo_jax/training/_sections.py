"""The sections `data`, `optimizer`, `sparsity` and `train`: what a run does.

Every experiment has these and those of `_layout_sections`, and a `model` of its own.

Only keys that change the run exist. Each is checked where its section is made, so that
a configuration in hand is one that can start; what needs the number of devices or the
data is checked by `check_batch` and by the experiment, before the first step.
"""

import dataclasses
from typing import Literal

from sfpo_jax._validate import check_at_least, check_range
from sfpo_jax.training._groups import Group
from sfpo_jax.training._layout_sections import Parallel


@dataclasses.dataclass(frozen=True)
class Data:
    """Where the examples come from and how many make a step."""

    source: str = "mnist5k"
    """mnist5k, or the path of an .npz file with uint8 `images` [n, h, w] or
    [n, h, w, c] and integer `labels` [n], or of a folder with a folder of JPEG and PNG
    files for each class, or with two such folders, train and val."""
    test_share: float = 0.2
    """Share of each class held out for the test, where there is no val."""
    batch_size: int = 128
    """Examples of a step, over all devices."""
    shift: int = 1
    """Training images in memory (not of a folder) move by up to this many pixels of the
    source, at random."""
    crop_area: float = 0.08
    """Least share of the area that a random crop keeps, of a folder's training images;
    1: no random crop."""
    flip: float = 0.5
    """Probability that a folder's training image is mirrored."""
    centre_share: float = 0.875
    """Side of a folder's test images that is kept, by the shorter side of the file."""
    workers: int = 0
    """Processes that decode the images of a folder; 0: threads."""

    def __post_init__(self) -> None:
        check_range(
            "data.test_share",
            self.test_share,
            0.0,
            1.0,
            "the share of each class that is held out",
            open_low=True,
            open_high=True,
        )
        check_at_least("data.batch_size", self.batch_size, 1, "the examples of a step")
        check_at_least("data.shift", self.shift, 0, "the largest move in pixels")
        for name in ("crop_area", "centre_share"):
            check_range(
                f"data.{name}",
                getattr(self, name),
                0.0,
                1.0,
                "a share of the image, 1 for all of it",
                open_low=True,
            )
        check_range("data.flip", self.flip, 0.0, 1.0, "a probability")
        check_at_least("data.workers", self.workers, 0, "a number of processes")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Adam with decoupled decay, whichever way its moments are reduced."""

    learning_rate: float = 5e-3
    """Step size at its peak."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the step size falls after its warm-up: to 0, or not at all."""
    warmup: float = 0.05
    """Share of the run over which the step size rises linearly from 0."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.99
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.05
    """Decoupled decay of the weight matrices; vectors are not decayed."""
    clip_norm: float | Literal["none"] = "none"
    """Largest norm of the gradient that passes unscaled."""
    groups: tuple[Group, ...] = ()
    """Parameters with a rate or decay of their own; the first that matches counts."""

    def __post_init__(self) -> None:
        check_range(
            "optimizer.learning_rate",
            self.learning_rate,
            0.0,
            float("inf"),
            "the step size, positive and finite",
            open_low=True,
            open_high=True,
        )
        check_range(
            "optimizer.warmup", self.warmup, 0.0, 1.0, "a share of the run, not steps"
        )
        for name in ("b1", "b2"):
            check_range(
                f"optimizer.{name}",
                getattr(self, name),
                0.0,
                1.0,
                "a decay factor",
                open_high=True,
            )
        for name in ("eps", "weight_decay"):
            check_range(
                f"optimizer.{name}",
                getattr(self, name),
                0.0,
                float("inf"),
                "finite, and 0 where it is not wanted",
                open_high=True,
            )
        if self.clip_norm != "none":
            check_range(
                "optimizer.clip_norm",
                self.clip_norm,
                0.0,
                float("inf"),
                "a norm; write none to clip nothing",
                open_low=True,
                open_high=True,
            )


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """Masking of gradients before the momentum of 1bit_adam."""

    base: float = 0.7
    """Share of entries dropped at step 0 of the schedule."""
    final: float = 0.3
    """Share of entries dropped at the end of the run."""
    schedule: Literal["cosine", "constant", "none"] = "cosine"
    """From base to final along half a cosine, base all along, or no masking."""
    begin: Literal["freeze", "start"] = "freeze"
    """Mask from the freeze of the variance on, or (to study it) from step 0."""
    error_feedback: bool = True
    """Add what the mask dropped to later gradients."""
    min_size: int = 1024
    """Tensors of fewer entries are never masked."""

    def __post_init__(self) -> None:
        for name in ("base", "final"):
            check_range(
                f"sparsity.{name}",
                getattr(self, name),
                0.0,
                1.0,
                "the share of entries dropped",
            )
        check_at_least("sparsity.min_size", self.min_size, 0, "a number of entries")


@dataclasses.dataclass(frozen=True)
class Train:
    """The run itself."""

    name: str = "run"
    """Begins the name of the folder of results."""
    runs: str = "runs"
    """Folder that holds the folders of results."""
    steps: int = 800
    """Updates of the parameters."""
    seed: int = 0
    """Of the initial parameters and the order of the examples."""
    compare: bool = True
    """Also train dense AdamW beside it: same seeds, order of examples and steps."""
    evaluate_every: int = 100
    """Steps between two tests."""
    log_every: int = 20
    """Steps between two lines of metrics."""
    folder: str = "none"
    """Folder of results, in place of a new one in `runs`; one that holds a run goes
    on where that stopped."""
    resume: str = "none"
    """Folder of a run to go on with, under its own configuration."""
    checkpoint_every: int = 100
    """Steps between two checkpoints; the last step and a stop make one as well."""
    keep: int = 3
    """Checkpoints that stay, of each optimizer."""
    ema: float | Literal["none"] = "none"
    """Test an average of the weights that keeps this share a step, e.g. 0.999."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard."""
    agree_every: int | Literal["none"] = 100
    """Steps between two checks that all devices hold the same parameters and states;
    each regular checkpoint makes one as well."""
    profile: bool = False
    """Trace some steps of each phase, and write where their time goes; `--profile` is
    short for it."""
    max_nonfinite: int = 25
    """Steps in a row whose loss is not finite that end the run."""

    def __post_init__(self) -> None:
        for name in ("steps", "evaluate_every", "log_every", "checkpoint_every"):
            check_at_least(f"train.{name}", getattr(self, name), 1, "a step count")
        check_at_least("train.seed", self.seed, 0, "a seed")
        check_at_least("train.keep", self.keep, 1, "a number of checkpoints")
        check_at_least("train.max_nonfinite", self.max_nonfinite, 1, "a step count")
        if self.agree_every != "none":
            check_at_least("train.agree_every", self.agree_every, 1, "a step count")
        if self.ema != "none":
            check_range(
                "train.ema",
                self.ema,
                0.0,
                1.0,
                "the share of the average that a step keeps; write none to test the "
                "weights themselves",
                open_low=True,
                open_high=True,
            )
        if not self.name or "/" in self.name:
            raise ValueError(
                f"`train.name` must be one part of a path, got {self.name!r}: it "
                "begins the name of a folder in `train.runs`."
            )


def check_batch(batch_size: int, parallel: Parallel, devices: int) -> None:
    """Raises ValueError unless the batch divides over the devices and microbatches.

    Args:
      batch_size: the value of `data.batch_size`.
      parallel: its `microbatches` is meant.
      devices: devices over which the batch is split.
    """
    pieces = devices * parallel.microbatches
    if batch_size % pieces:
        below = batch_size // pieces * pieces
        choices = f"{below} or {below + pieces}" if below else f"{pieces}"
        raise ValueError(
            f"`data.batch_size` must be divisible by {devices} devices times "
            f"{parallel.microbatches} microbatches, got {batch_size}: "
            f"take {choices}."
        )
