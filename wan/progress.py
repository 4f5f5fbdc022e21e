"""What a person sees while a run goes on: a live table on a terminal, and plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from wan.report import human_bytes, human_count, human_seconds

QUIET_S = 5.0
"""Seconds between two plain lines of one phase: often enough to watch, seldom enough to keep."""

_STATE_STYLES = {
    "active": "green",
    "training": "green",
    "done": "green",
    "left": "dim",
    "lost": "bold red",
    "failed": "bold red",
}


@dataclass(frozen=True, kw_only=True)
class IslandView:
    """One island at one moment."""

    id: str
    state: str
    """In a word: joining, active, suspect, lost, left ..."""
    step: int
    """Inner steps done."""
    loss: float | None
    """Last training loss, nats per byte; None before the first."""
    tokens_per_second: float
    bytes_up: int
    """Bytes to the coordinator so far."""
    bytes_down: int
    """Bytes from the coordinator so far."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The run at one moment."""

    phase: str
    """In a word: waiting, training, done ..."""
    reason: str
    """Why the run is in this phase, or what it waits for; empty where that goes without saying."""
    steps: int
    """Inner steps of each island in the whole run."""
    rounds: int
    """Outer updates so far."""
    islands: tuple[IslandView, ...]
    elapsed_s: float
    """Seconds since the first inner step; 0 before it."""

    @property
    def step(self) -> int:
        """Inner steps of the slowest island."""
        return min((island.step for island in self.islands), default=0)


def eta_s(view: RunView) -> float | None:
    """Seconds left at the pace so far of the slowest island; None before its first step."""
    return view.elapsed_s / view.step * max(view.steps - view.step, 0) if view.step else None


class Progress:
    """Shows a run on `console`: live where it is a terminal, else as lines that are easy to grep.

    Args:
        console: where to write.
        title: what is running.
        clock: seconds of a monotonic clock, such as `time.monotonic`.
    """

    def __init__(self, console: Console, title: str, clock: Callable[[], float]) -> None:
        self._console = console
        self._title = title
        self._clock = clock
        self._start = clock()
        live = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, auto_refresh=False) if live else None
        self._shown: RunView | None = None
        self._pending: RunView | None = None
        self._shown_at = self._start

    def __enter__(self) -> Self:
        self._start = self._shown_at = self._clock()
        if self._live:
            self._live.start()
        else:
            self._print(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        elif self._pending:
            self._show_line(self._pending)

    def update(self, view: RunView) -> None:
        """Shows `view`: on a terminal at once; as a line when it differs, at most every `QUIET_S` a phase."""
        if self._live:
            self._live.update(_render(self._title, view, self._elapsed()), refresh=True)
            return
        if self._shown and replace(view, elapsed_s=self._shown.elapsed_s) == self._shown:
            return
        new_phase = self._shown is None or view.phase != self._shown.phase
        if new_phase or self._clock() - self._shown_at >= QUIET_S:
            self._show_line(view)
        else:
            self._pending = view

    def note(self, text: str) -> None:
        """Prints one line that stays: above the live table, or among the plain lines with the time."""
        self._print(text if self._live else f"{self._elapsed():>5.0f} s  {text}")

    def _elapsed(self) -> float:
        return self._clock() - self._start

    def _show_line(self, view: RunView) -> None:
        new_phase = self._shown is None or view.phase != self._shown.phase
        self._print(_line(view, self._elapsed(), with_phase=new_phase))
        self._shown, self._pending, self._shown_at = view, None, self._clock()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _loss(view: RunView) -> float | None:
    """Mean training loss of the islands that have one, nats per byte."""
    losses = [island.loss for island in view.islands if island.loss is not None]
    return sum(losses) / len(losses) if losses else None


def _totals(view: RunView) -> list[str]:
    """The run in a few words: rounds, loss, pace, traffic."""
    loss = _loss(view)
    return [
        f"rounds {view.rounds}",
        *([] if loss is None else [f"loss {loss:.2f}"]),
        f"{human_count(sum(island.tokens_per_second for island in view.islands))} tok/s",
        f"up {human_bytes(sum(island.bytes_up for island in view.islands))}",
        f"down {human_bytes(sum(island.bytes_down for island in view.islands))}",
    ]


def _left(view: RunView) -> list[str]:
    left = eta_s(view)
    return [f"left {human_seconds(left)}"] if left else []


def _status(view: RunView) -> str:
    return f"{view.phase}: {view.reason}" if view.reason else view.phase


def _line(view: RunView, elapsed_s: float, *, with_phase: bool) -> str:
    """The run as one plain line; the phase only where it is new, has a reason, or is all there is to say."""
    begun = view.step > 0
    parts = [f"{elapsed_s:>5.0f} s"]
    if with_phase or view.reason or not begun:
        parts.append(_status(view))
    if begun:
        parts += [f"step {view.step}/{view.steps}", *_totals(view), *_left(view)]
    return "  ".join(parts)


def _render(title: str, view: RunView, elapsed_s: float) -> RenderableType:
    """The run for a terminal: title, a row per island, and the whole run in the last lines."""
    islands = Table(box=None, expand=True, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    islands.add_column("island", overflow="ellipsis", no_wrap=True, max_width=16)
    islands.add_column("", ratio=1, min_width=8)
    for name in ("step", "loss", "tok/s", "up", "down"):
        islands.add_column(name, justify="right", no_wrap=True, min_width=7)
    islands.add_column("state", no_wrap=True)
    for island in view.islands:
        islands.add_row(
            Text(island.id),
            ProgressBar(total=max(view.steps, 1), completed=island.step, complete_style="blue", finished_style="green"),
            f"{island.step}/{view.steps}",
            "-" if island.loss is None else f"{island.loss:.2f}",
            human_count(island.tokens_per_second),
            human_bytes(island.bytes_up),
            human_bytes(island.bytes_down),
            Text(island.state, style=_STATE_STYLES.get(island.state, "yellow")),
        )
    totals = "  ".join([*_totals(view), f"elapsed {human_seconds(elapsed_s)}", *_left(view)])
    status = Text(_status(view), style="yellow" if view.reason else "dim")
    return Group(
        Text(title, style="bold"),
        Padding(islands, (1, 0)),
        Text(totals, no_wrap=True, overflow="ellipsis"),
        status,
    )
