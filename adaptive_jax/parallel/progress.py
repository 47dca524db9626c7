"""A progress bar at the foot of the terminal.

123/600 ━━━━━━━━━━━━━━━━━━━━ loss 4.412  perplexity 82.5  14,300 words/s 0:00:36
"""

import datetime
import time
from collections.abc import Sequence

from adaptive_jax.errors import of_extra

with of_extra("train"):
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column
    from rich.text import Text


WIDE = 100  # columns of a terminal with room for a bar beside the loss and the words a second


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 107.4 is "0:01:47"."""
    return str(datetime.timedelta(seconds=int(seconds)))


class Bar:
    """A bar with the steps done, a text, and the time left, or the time taken once all are done.

    Args:
        total, done: number of steps, and of those done at the beginning.
        parts: the text, the most important part first; a narrow terminal has no bar, and cuts off
            the last parts.
        console: by default stderr. Nothing is drawn if it is no terminal, or with `visible=False`.
        limit: seconds from now after which the steps end, finished or not; None: no limit.
        every: seconds between progress lines on stderr if that is no terminal; None: no lines.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        parts: Sequence[str] = (),
        console: Console | None = None,
        visible: bool = True,
        limit: float | None = None,
        every: float | None = None,
    ):
        self.console = console or Console(stderr=True)
        self.visible = visible and self.console.is_terminal
        self.every = every if visible and not self.visible else None
        self.last_line = time.monotonic()
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # fills the line
        self.progress = Progress(
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            *([BarColumn(20)] if self.console.width >= WIDE else []),
            TextColumn("{task.description}", markup=False, table_column=rest),
            _TimeLeft(limit),
            console=self.console,
            disable=not self.visible,
            expand=True,
        )
        self.task = self.progress.add_task("  ".join(parts), total=total, completed=done)
        self.progress.start()

    def show(self, done: int | None = None, parts: Sequence[str] | None = None) -> None:
        """Shows that `done` steps are done, and other `parts`; None changes nothing."""
        text = None if parts is None else "  ".join(parts)
        self.progress.update(self.task, completed=done, description=text)
        if self.every is not None and time.monotonic() - self.last_line >= self.every:
            self.last_line, [task] = time.monotonic(), self.progress.tasks
            line = f"{task.description}  {task.completed:,.0f}/{task.total:,.0f}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def say(self, line: str) -> None:
        """Prints a line above the bar, or to stdout where there is none."""
        if self.visible:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Ends the bar."""
        self.progress.stop()


class _TimeLeft(TimeRemainingColumn):
    """The time left, by the pace so far or by the limit, whichever ends first."""

    def __init__(self, limit):
        super().__init__(elapsed_when_finished=True)
        self.limit = limit

    def render(self, task):
        if self.limit is None or task.finished:
            return super().render(task)
        seconds = max(0.0, self.limit - (task.elapsed or 0.0))
        by_pace = seconds if task.time_remaining is None else task.time_remaining
        return Text(clock(min(seconds, by_pace)), style="progress.remaining")
