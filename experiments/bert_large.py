"""Dense AdamW and SFPO train a BERT side by side.

    python -m experiments.bert_large
    python -m experiments.bert_large --config configs/bert_large.yaml
    python -m experiments.bert_large --train.resume runs/bert_stdlib-20250102-030405

Without arguments it is the small network of `configs/bert_stdlib.yaml`, pretrained on
the sources of Python's standard library: it guesses hidden words, and whether the
second part of a row follows the first. With `model.task` classify it tells the class of
texts, from pretrained weights where `pretrained.folder` names some.
"""

import sys
from collections.abc import Sequence

from experiments.bert_run import BertConfig, prepare_bert
from experiments.command import Experiment, run_experiment

PROGRAM = "python -m experiments.bert_large"


def main(argv: Sequence[str]) -> int:
    """Runs the command; arguments and status are those of `run_experiment`."""
    description = "Pretrains a BERT, or trains it to classify texts."
    experiment = Experiment(PROGRAM, description, BertConfig(), prepare_bert)
    return run_experiment(experiment, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
