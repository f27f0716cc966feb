"""Dense AdamW and SFPO train a Vision Transformer side by side.

    python -m experiments.vit_l
    python -m experiments.vit_l --config configs/vit_l.yaml --sparsity.base 0.6

Without arguments it is the narrow network of `configs/vit_mnist5k.yaml`, on 5,000 real
digits and eight devices shown by the CPU.
"""

import shlex
import sys
from collections.abc import Sequence

from rich.console import Console

from experiments import report
from experiments.contender import Record, Result
from experiments.curves import save_curves
from experiments.output import RunFolder
from experiments.progress import RunProgress
from experiments.vit_run import Config, Run, prepare
from sfpo_jax.training import exit_on_config_error, load_config

PROGRAM = "python -m experiments.vit_l"


def main(argv: Sequence[str]) -> int:
    """Trains, reports, and writes `runs/<name>-<time>/`.

    Args:
      argv: the arguments after the program's name.

    Returns:
      The exit status: 0, or 130 where Ctrl-C ended it.

    Raises:
      SystemExit: with status 2 for a configuration that cannot run, 0 after `--help`.
    """
    console = Console()
    with exit_on_config_error(PROGRAM):
        config = load_config(
            Config(), argv, prog=PROGRAM, description="Trains a Vision Transformer."
        )
        run = prepare(config)
        folder = RunFolder(config.train.runs, config.train.name, config)
    try:
        results = _train(run, folder, console)
    except KeyboardInterrupt:
        console.print(f"interrupted; what was measured lies in {folder.path}")
        return 130
    _write_report(run, folder, results, shlex.join([*PROGRAM.split(), *argv]))
    console.print(report.console_table(results))
    console.print(f"report: {folder.path / 'report.md'}", soft_wrap=True)
    return 0


def _train(run: Run, folder: RunFolder, console: Console) -> list[Result]:
    names = [contender.name for contender in run.contenders]
    results = []
    with RunProgress(console, names, run.config.train.steps) as progress:

        def keep(record: Record) -> None:
            folder.record(record)
            progress.show(record)

        for contender in run.contenders:
            progress.begin(contender.name)
            results.append(run.start(contender, keep))
    return results


def _write_report(
    run: Run, folder: RunFolder, results: list[Result], command: str
) -> None:
    title = run.config.train.name
    size = f"{run.task.parameters:,} parameters, {run.mesh.size} devices"
    save_curves(folder.path / "curves.png", results, f"{title}: {size}")
    text = report.markdown(
        results,
        run.dataset,
        title=title,
        command=command,
        config_text=(folder.path / "config.yaml").read_text(encoding="utf-8"),
    )
    (folder.path / "report.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
