"""What a run shows while it goes: a bar on a terminal, plain lines elsewhere."""

from types import TracebackType

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
    """Shows the records of several contenders, one bar or one line at a time.

    Args:
      console: where to; bars only where it is a terminal.
      names: the contenders, in the order they run.
      steps: steps of each.
    """

    def __init__(self, console: Console, names: list[str], steps: int) -> None:
        self._console = console
        self._steps = steps
        self._accuracy: dict[str, str] = {}
        self._width = max(map(len, names))
        self._bars: dict[str, TaskID] = {}
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn(f"{{task.description:<{self._width}}}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}"),
                console=console,
            )
            for name in names:
                self._bars[name] = self._progress.add_task(
                    name, total=steps, start=False, status="waiting"
                )

    def __enter__(self) -> "RunProgress":
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

    def begin(self, name: str) -> None:
        """A contender starts: its program is compiled before the first step."""
        if self._progress:
            self._progress.start_task(self._bars[name])
            self._progress.update(self._bars[name], status="compiling")
        else:
            self._console.print(f"{name}: compiling", highlight=False)

    def show(self, record: Record) -> None:
        """A record of `run_contender`."""
        name = record["contender"]
        if "test_accuracy" in record:
            self._accuracy[name] = f"accuracy {record['test_accuracy']:6.2%}"
            if not self._progress:
                self._line(record, self._accuracy[name])
            return
        if self._progress:
            status = f"loss {record['train_loss']:.3f}  {self._accuracy.get(name, '')}"
            self._progress.update(
                self._bars[name], completed=record["step"], status=status
            )
        elif record["step"] * 10 // self._steps > self._tenth(record):
            self._line(
                record,
                f"loss {record['train_loss']:6.3f}  {record['step_ms']:6.1f} ms a step",
            )
