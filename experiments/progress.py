"""What a run shows while it goes: a bar on a terminal, plain lines elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from experiments.contender import Record


class RunProgress:
    """Shows the records of several contenders; a context manager.

    Args:
      console: where to; bars only where it is a terminal.
      names: the contenders, in the order they run.
      steps: steps of each.
    """

    def __init__(self, console: Console, names: list[str], steps: int) -> None:
        self._console = console
        self._steps = steps
        self._width = max(map(len, names))
        self._accuracy = dict.fromkeys(names, "")
        self._tenths = dict.fromkeys(names, 0)
        self._bars: dict[str, TaskID] = {}
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}"),
                console=console,
            )
            for name in names:
                self._bars[name] = self._progress.add_task(
                    name, total=steps, start=False, status="waiting"
                )

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress:
            self._progress.stop()

    def begin(self, name: str, done: int = 0) -> None:
        """A contender starts after step `done`; first its program is compiled."""
        if self._progress:
            self._progress.update(self._bars[name], completed=done, status="compiling")
        else:
            self._line(name, done, "compiling")

    def note(self, text: object) -> None:
        """Shows what a step computes again, or a fault that was found."""
        self._console.print(f"{text}\n", highlight=False, markup=False, soft_wrap=True)

    def finished(self, name: str, accuracy: float) -> None:
        """A contender was finished before the run was stopped."""
        text = f"test accuracy {accuracy:.1%}"
        if self._progress:
            bar = self._bars[name]
            self._progress.update(bar, completed=self._steps, status=text)
        else:
            self._line(name, self._steps, text)

    def show(self, record: Record) -> None:
        """Shows a record of `run_contender`."""
        name, done = record["contender"], record["step"]
        if "test_accuracy" in record:
            text = f"test accuracy {record['test_accuracy']:.1%}"
            self._accuracy[name] = text
        else:
            text = f"loss {record['train_loss']:.3f}"
        if self._progress:
            self._progress.start_task(self._bars[name])
            status = f"{text}  {self._accuracy[name]}" if "loss" in text else text
            self._progress.update(self._bars[name], completed=done, status=status)
        elif "test_accuracy" in record or done * 10 // self._steps > self._tenths[name]:
            # Ten lines of the loss are enough for a log file.
            self._tenths[name] = done * 10 // self._steps
            self._line(name, done, text)

    def _line(self, name: str, done: int, text: str) -> None:
        steps = f"{done:>{len(str(self._steps))}}/{self._steps}"
        line = f"{name:<{self._width}}  step {steps}  {text}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
