"""What the command of every experiment does: train, go on, report."""

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.console import Console

from experiments import report
from experiments.contender import Contender, Record, Result, RunStopped
from experiments.curves import save_curves
from experiments.output import PROFILE, RunFolder, open_folder
from experiments.profiling.recorder import Recorder
from experiments.profiling.summary import Profile, summarise
from experiments.progress import RunProgress
from experiments.resume import load_run_config
from experiments.run import Run
from experiments.watch import Watch
from sfpo_jax.memory import BudgetError
from sfpo_jax.parallel import current_hosts
from sfpo_jax.training import (
    CheckpointError,
    DisagreementError,
    NonFiniteLossError,
    Stop,
    check_tensorboard,
    exit_on_config_error,
    join,
    stop_on_signals,
)


class Experiment(NamedTuple):
    """What one experiment's command differs in."""

    program: str  # how it is called
    description: str  # what it does, for the help
    defaults: Any  # a dataclass of sections, `train` among them
    prepare: Callable[[Any], Run]  # a configuration -> a run


def run_experiment(experiment: Experiment, argv: Sequence[str]) -> int:
    """Trains, reports, and writes `runs/<name>-<time>/`, or goes on there.

    Args:
      experiment: what is trained.
      argv: the arguments after the program's name.

    Returns:
      The exit status: 0, also where SIGTERM or Ctrl-C ended the run early and it was
      saved; 1 where a checkpoint cannot be written or used, the loss stays not finite
      or parallel.time.budget cannot be met; 130 where a second Ctrl-C ended it at once.

    Raises:
      SystemExit: with status 2 for a configuration that cannot run, 0 after `--help`.
    """
    program = experiment.program
    with exit_on_config_error(program):
        config = load_run_config(
            experiment.defaults,
            spelled_out(argv),
            prog=program,
            description=experiment.description,
        )
        check_tensorboard(config.train.tensorboard)
        hosts = join(config.distributed)
    with hosts.failing_together(program):
        status = _run(experiment, config, argv, Console(quiet=not hosts.is_first))
    hosts.leave(status)
    return status


_SHORT = {
    "--distributed": "--distributed.enable=true",
    "--profile": "--train.profile=true",
}


def spelled_out(argv: Sequence[str]) -> list[str]:
    """Arguments of an experiment, those that are short in full."""
    return [_SHORT.get(argument, argument) for argument in argv]


def _run(
    experiment: Experiment, config: Any, argv: Sequence[str], console: Console
) -> int:
    program = experiment.program

    def say(line: object) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    with exit_on_config_error(program):
        run = experiment.prepare(config)
        for note in run.notes:
            say(note)
        # Without what is left open, so that a run goes on as it began.
        folder = open_folder(run.config, run.config.train, say)
    go_on = f"{program} --train.resume {shlex.quote(str(folder.path))}"
    profiles: list[Profile] = []
    try:
        with stop_on_signals() as stop:
            results = _train(run, folder, console, stop, profiles)
    except RunStopped as stopped:
        say(f"{stopped}; it goes on with: {go_on}")
        return 0
    except KeyboardInterrupt:
        say(f"interrupted; it goes on from its last checkpoint with: {go_on}")
        return 130
    except (
        BudgetError,
        CheckpointError,
        DisagreementError,
        NonFiniteLossError,
    ) as error:
        sys.stderr.write(f"{program}: {error}\n")
        return 1
    finally:
        folder.close()
    if current_hosts().is_first:
        _write_report(run, folder, results, shlex.join([*program.split(), *argv]))
    console.print(report.console_table(results))
    if run.config.train.profile and current_hosts().is_first:
        say(_write_profile(run, folder, profiles))
    say(f"report: {folder.path / 'report.md'}")
    return 0


def _train(
    run: Run,
    folder: RunFolder,
    console: Console,
    stop: Stop,
    profiles: list[Profile],
) -> list[Result]:
    names = [contender.name for contender in run.contenders]
    with RunProgress(console, names, run.config.train.steps) as progress:
        for contender in run.contenders:
            if known := folder.results.get(contender.name):
                progress.finished(contender.name, known.test_accuracy)
            elif stop.meet():
                raise RunStopped(f"{contender.name} was not begun")
            else:
                recorder = _recorder(run, contender, folder)
                folder.finish(
                    _train_one(run, contender, folder, progress, stop, recorder)
                )
                profiles += recorder.profiles if recorder else []
    return [folder.results[name] for name in names]


def _train_one(
    run: Run,
    contender: Contender,
    folder: RunFolder,
    progress: RunProgress,
    stop: Stop,
    recorder: Recorder | None,
) -> Result:
    with folder.store(contender.name) as store:
        before = [r for result in folder.results.values() for r in result.records]
        watch = Watch(dataclasses.asdict(run.config), before)

        def keep(record: Record) -> None:
            store.record(record)
            progress.show(record)
            for finding in watch.see(record):
                progress.note(finding)

        progress.begin(contender.name, max(store.checkpoints.steps(), default=0))
        return run.start(
            contender,
            keep,
            on_plan=progress.note,
            store=store,
            stop=stop,
            recorder=recorder,
        )


def _recorder(run: Run, contender: Contender, folder: RunFolder) -> Recorder | None:
    """Of the first host, whose devices stand for all; None where none is asked for."""
    if not run.config.train.profile or not current_hosts().is_first:
        return None
    return Recorder(folder.traces(contender.name))


def _write_profile(run: Run, folder: RunFolder, profiles: list[Profile]) -> str:
    """Writes the page about the traced steps, and returns it."""
    if not profiles:
        return (
            "nothing was profiled: no phase had enough steps in a row between tests "
            "and checkpoints, or the run was done already"
        )
    text = summarise(
        profiles,
        title=run.config.train.name,
        device_kind=run.mesh.devices.flat[0].device_kind,
        devices=run.mesh.size,
        tokens=getattr(run.config.model, "length", None),
    )
    path = folder.path / PROFILE / "summary.md"
    path.write_text(text, encoding="utf-8")
    return f"{text}\nprofile: {path}"


def _write_report(
    run: Run, folder: RunFolder, results: list[Result], command: str
) -> None:
    title = run.config.train.name
    size = f"{run.task.parameters:,} parameters, {run.mesh.size} devices"
    save_curves(folder.path / "curves.png", results, f"{title}: {size}")
    text = report.markdown(
        results,
        run.data,
        title=title,
        command=command,
        config_text=(folder.path / "config.yaml").read_text(encoding="utf-8"),
    )
    (folder.path / "report.md").write_text(text, encoding="utf-8")
