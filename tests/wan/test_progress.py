"""What is seen during a run, under a clock that the test turns."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from wan.progress import IslandView, Progress, RunView, eta_s


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def island(name: str, step: int, loss: float | None = 2.41) -> IslandView:
    return IslandView(
        id=name,
        state="active",
        step=step,
        loss=loss,
        tokens_per_second=13_050.0,
        bytes_up=1_600_000,
        bytes_down=1_550_000,
    )


WAITING = RunView(
    phase="waiting",
    reason="1 of 2 islands has joined",
    steps=300,
    rounds=0,
    islands=(island("east", 0, None),),
    elapsed_s=0.0,
)
TRAINING = RunView(
    phase="training",
    reason="",
    steps=300,
    rounds=3,
    islands=(island("east", 120), island("west", 128)),
    elapsed_s=42.0,
)
STATS = "rounds 3  loss 2.41  26.1k tok/s  up 3.2 MB  down 3.1 MB"


def plain() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=60), text


def test_time_left_follows_the_slowest_island() -> None:
    assert eta_s(TRAINING) == pytest.approx(63.0)
    assert eta_s(WAITING) is None
    assert eta_s(replace(TRAINING, islands=())) is None
    assert eta_s(replace(TRAINING, islands=(island("east", 301),))) == 0


def test_plain_lines_come_at_most_every_five_seconds_and_with_every_phase() -> None:
    console, text = plain()
    clock = Clock()
    with Progress(console, "demo", clock) as progress:
        progress.update(WAITING)
        clock.now += 6
        progress.update(WAITING)
        progress.update(replace(WAITING, reason="2 of 2 islands have joined"))
        clock.now += 1
        progress.update(replace(TRAINING, islands=(island("east", 0), island("west", 1))))
        clock.now += 4
        progress.update(replace(TRAINING, islands=(island("east", 60), island("west", 61))))
        clock.now += 1
        progress.update(TRAINING)
        clock.now += 9
        progress.update(replace(TRAINING, elapsed_s=51.0))
        progress.update(replace(TRAINING, reason="west is late"))
        progress.update(replace(TRAINING, phase="done", islands=(island("east", 300),)))
    assert text.getvalue().splitlines() == [
        "demo",
        "    0 s  waiting: 1 of 2 islands has joined",
        "    6 s  waiting: 2 of 2 islands have joined",
        "    7 s  training",
        f"   12 s  step 120/300  {STATS}  left 63 s",
        f"   21 s  training: west is late  step 120/300  {STATS}  left 63 s",
        "   21 s  done  step 300/300  rounds 3  loss 2.41  13.1k tok/s  up 1.6 MB  down 1.6 MB",
    ]


def test_the_last_state_is_shown_at_the_end() -> None:
    console, text = plain()
    clock = Clock()
    with Progress(console, "demo", clock) as progress:
        progress.update(WAITING)
        clock.now += 1
        progress.update(replace(WAITING, reason="giving up"))
    assert text.getvalue().splitlines()[-1] == "    1 s  waiting: giving up"


def test_a_note_is_one_line_with_the_time_and_no_markup() -> None:
    console, text = plain()
    clock = Clock()
    with Progress(console, "demo", clock) as progress:
        clock.now += 42
        progress.note("stopped [west] " + "x" * 80)
    assert text.getvalue().splitlines() == ["demo", "   42 s  stopped [west] " + "x" * 80]


def test_a_dumb_terminal_gets_plain_lines() -> None:
    text = io.StringIO()
    console = Console(file=text, width=60, force_terminal=True, _environ={"TERM": "dumb"})
    with Progress(console, "demo", Clock()) as progress:
        progress.update(WAITING)
    assert "    0 s  waiting: 1 of 2 islands has joined" in text.getvalue()


def test_a_terminal_shows_islands_and_the_run() -> None:
    console = Console(record=True, force_terminal=True, width=100, file=io.StringIO(), _environ={"TERM": "xterm"})
    clock = Clock()
    with Progress(console, "demo", clock) as progress:
        progress.update(WAITING)
        progress.note("west [late] joined")
        clock.now += 130
        progress.update(replace(TRAINING, islands=(island("[b]east", 120, None), island("west", 128))))
    shown = " ".join(console.export_text().split())
    for text in (
        "demo island step loss tok/s up down state",
        "waiting: 1 of 2 islands has joined",
        "west [late] joined",
        "120/300 - 13.1k 1.6 MB 1.6 MB active",
        "128/300 2.41 13.1k 1.6 MB 1.6 MB active",
        "[b]east",
        f"{' '.join(STATS.split())} elapsed 2 min 10 s left 63 s",
        "training",
    ):
        assert text in shown
