"""The answer: how much memory a program needs, whose, and whether it fits."""

import dataclasses
import json
import math
from typing import Any

from sfpo_jax.memory._advice import advise, warn_about_fraction
from sfpo_jax.memory._buffers import Buffer
from sfpo_jax.memory._lifetimes import Lifetimes, make_lifetimes
from sfpo_jax.memory._report import render
from sfpo_jax.memory._timeline import Timeline


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one device holds while the program runs, in bytes.

    Attributes:
      device: name of the card.
      mesh_shape: mesh axes and their sizes; empty for a program on one device.
      compiler: "gpu": XLA's compiler for that card assigned every buffer; "cpu": the
        CPU's did, which fuses and reorders otherwise.
      argument_bytes: parameters, states, batch.
      output_bytes: what is returned, whether or not in an argument's place.
      alias_bytes: outputs that take the place of a donated argument.
      temporary_bytes: the rest at the fullest moment.
      host_bytes: what lies in the host's memory for the device, not in its total; of
        compiler "gpu" alone, for the CPU's does not tell it apart.
      budget_bytes: what the total is compared with.
      memory_bytes: all the memory of the card.
      flops: operations of one device in one run, matrix products and convolutions;
        None where the program could not be traced a second time.
      wire_bytes: bytes one device sends in one run, by mesh axis.
      ledger: the total, told apart; the values add up to it exactly.
      buffers: the largest temporaries at the fullest moment.
      notes: what to know about these numbers.
      timeline: how `lifetimes` is kept; None where the compiler did not tell.
    """

    device: str
    mesh_shape: dict[str, int]
    compiler: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    host_bytes: int
    budget_bytes: int
    memory_bytes: int
    flops: int | None
    wire_bytes: dict[str, int]
    ledger: dict[str, int]
    buffers: tuple[Buffer, ...]
    notes: tuple[str, ...]
    timeline: Timeline | None = None

    @property
    def total_bytes(self) -> int:
        """Arguments + outputs - aliases + temporaries."""
        held = self.argument_bytes + self.output_bytes - self.alias_bytes
        return held + self.temporary_bytes

    @property
    def fits(self) -> bool:
        """Whether the total is within the budget."""
        return self.total_bytes <= self.budget_bytes

    @property
    def advice(self) -> tuple[str, ...]:
        """What to try next, the largest saving first; empty for a plan that fits."""
        if self.fits:
            return ()
        devices = math.prod(self.mesh_shape.values())
        return advise(self.ledger, self.budget_bytes, devices)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Where JAX would refuse what the card itself holds."""
        return warn_about_fraction(self.total_bytes, self.memory_bytes)

    @property
    def lifetimes(self) -> Lifetimes | None:
        """What lives when; None where the compiler did not tell.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> import sfpo_jax as sfpo
          >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
          >>> step = jax.jit(lambda x: jnp.tanh(x @ x) @ x)
          >>> made = sfpo.plan(step, x, compiler="cpu", cache=False)
          >>> lives = made.lifetimes
          >>> lives.peak_bytes + lives.holes == made.total_bytes
          True
          >>> [value.shape for value in lives.values][0]
          'f32[64,64]{1,0}'
        """
        if self.timeline is None:
            return None
        return make_lifetimes(self.ledger, self.timeline)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the lifetimes, in types that JSON knows."""
        plan = dataclasses.asdict(dataclasses.replace(self, timeline=None))
        # As long as the program, and of use as a picture.
        del plan["timeline"]
        plan["buffers"] = [
            {
                "bytes": buffer.size,
                "shape": buffer.shape,
                "op_name": buffer.origin.op_name,
                "file": buffer.origin.file,
                "line": buffer.origin.line,
                "is_activation": buffer.is_activation,
            }
            for buffer in self.buffers
        ]
        derived = ("total_bytes", "fits", "advice", "warnings")
        plan |= {name: getattr(self, name) for name in derived}
        return json.loads(json.dumps(plan))

    def __str__(self) -> str:
        return render(self)
