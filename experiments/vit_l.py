"""Dense AdamW and SFPO train a Vision Transformer side by side.

    python -m experiments.vit_l
    python -m experiments.vit_l --config configs/vit_l.yaml --sparsity.base 0.6
    python -m experiments.vit_l --train.resume runs/vit_mnist5k-20250102-030405

Without arguments it is the narrow network of `configs/vit_mnist5k.yaml`, on 5,000 real
digits and eight devices shown by the CPU. A run that was stopped, in whatever way, goes
on from its folder.
"""

import sys
from collections.abc import Sequence

from experiments.command import Experiment, run_experiment
from experiments.vit_run import Config, prepare

PROGRAM = "python -m experiments.vit_l"


def main(argv: Sequence[str]) -> int:
    """Runs the command; arguments and status are those of `run_experiment`."""
    description = "Trains a Vision Transformer."
    return run_experiment(Experiment(PROGRAM, description, Config(), prepare), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
