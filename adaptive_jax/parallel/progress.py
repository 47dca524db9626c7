"""A progress line at the foot of the terminal that fits its width.

123/600 ━━━━━━━━━━━━━━━━━━━━  loss 4.412  perplexity 82.5  14,300 words/s  ETA 0:00:36
"""

import datetime
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import Progress, Task
from rich.text import Text

BAR = 20  # columns of the bar at most
LEAST_BAR = 5  # a shorter one is left out
GAP = "  "


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 107.4 is "0:01:47"."""
    return str(datetime.timedelta(seconds=int(seconds)))


class Bar:
    """What is done of a total, what is known of it, and the time: left while it runs, passed when
    it has ended.

    On a terminal that is too narrow the bar shrinks and goes first, then the last parts; no part is
    cut.

    total, done: steps in all, and at the beginning.
    console: where to draw; by default stderr. Nothing is drawn where that is no terminal, or with
        `shown=False`.
    limit: seconds after which it ends before its last step, counted from its start; None: it does
        not.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        parts: Sequence[str] = (),
        console: Console | None = None,
        shown: bool = True,
        limit: float | None = None,
    ):
        self.console = console or Console(stderr=True)
        self.shown = shown and self.console.is_terminal
        self.progress = _Line(console=self.console, disable=not self.shown)
        self.task = self.progress.add_task(
            "", total=total, completed=done, parts=parts, ended=False, limit=limit
        )
        self.progress.start()

    def show(self, done: int | None = None, parts: Sequence[str] | None = None) -> None:
        """Shows that `done` steps are done, and other `parts`, the most important first; None
        changes nothing.
        """
        fields = {} if parts is None else {"parts": parts}
        self.progress.update(self.task, completed=done, **fields)

    def say(self, line: str) -> None:
        """Prints a line above the bar, or to stdout where there is none. It may be longer than
        the terminal is wide.
        """
        if self.shown:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def close(self) -> None:
        """Ends the bar, which then shows the time passed."""
        self.progress.update(self.task, ended=True)
        self.progress.stop()


class _Line(Progress):
    """The line as one text, because a narrow terminal would cut columns of rich in the middle
    of a number.
    """

    def get_renderables(self) -> Iterator[Text]:
        """The line of each task, for the console's width now."""
        for task in self.tasks:
            yield _line(task, self.console)


def _line(task: Task, console: Console) -> Text:
    done, time = f"{int(task.completed):,}/{int(task.total or 0):,}", _time(task)
    parts = list(task.fields["parts"])
    while parts and _width(done, *parts, time) > console.width:
        parts.pop()
    line = Text(done, no_wrap=True, overflow="ignore")
    free = min(BAR, console.width - _width(done, *parts, time) - 1)
    if free >= LEAST_BAR:
        filled = min(free, int(free * task.completed / (task.total or 1)))
        line.append(" ").append(_stroke(console) * filled, "bar.complete")
        line.append(_stroke(console) * (free - filled), "bar.back")
    return line.append(GAP + GAP.join([*parts, time]))


def _time(task):
    if task.fields["ended"] or task.finished:
        return f"time {clock(task.elapsed or 0)}"
    left, limit = task.time_remaining, task.fields["limit"]
    if limit is not None:
        rest = max(0.0, limit - (task.elapsed or 0))
        left = rest if left is None else min(left, rest)
    return f"ETA {'-:--:--' if left is None else clock(left)}"


def _width(*parts):
    return sum(map(len, parts)) + len(GAP) * (len(parts) - 1)


def _stroke(console):
    return "-" if console.options.ascii_only else "━"
