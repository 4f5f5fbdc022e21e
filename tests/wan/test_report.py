"""The report of a finished run: numbers, table, picture and page."""

from __future__ import annotations

import io
import json
import re
import struct
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from wan.report import (
    PLOT_DPI,
    PLOT_INCHES,
    Curve,
    IslandRow,
    Report,
    html,
    human_bytes,
    human_count,
    human_seconds,
    plot,
    summary,
    table,
    write,
)


def curve(name: str, *loss: float) -> Curve:
    return Curve(name=name, tokens=tuple(1_000_000 * i for i in range(len(loss))), loss=loss)


def island(name: str) -> IslandRow:
    return IslandRow(
        id=name,
        ranks=2,
        tokens=1_000_000,
        rounds=10,
        bytes_up=3_200_000,
        bytes_down=3_100_000,
        loss=1.97,
        tokens_per_second=13_050.0,
    )


PLAIN = Report(
    run_id="demo-1",
    islands=(island("east"), island("west")),
    parameters=3_212_544,
    steps=300,
    sync_every=30,
    fragments=1,
    rounds=10,
    tokens=2_000_000,
    bytes_up=6_400_000,
    bytes_down=6_200_000,
    bytes_data_parallel=478_800_000,
    loss=1.92,
    loss_unigram=3.31,
    loss_data_parallel=None,
    loss_single=None,
    digests_agree=True,
    seconds=376.0,
    train=(curve("east", 5.5, 3.0, 1.9), curve("west", 5.5, 3.1, 2.0)),
    held_out=(curve("DiLoCo, outer parameters", 5.5, 3.0, 1.92),),
    prompt="def f(",
    sample="def f(x):\n    return x\n",
    settings=(("sync.every_steps", "30", "demo"),),
)
COMPARED = replace(
    PLAIN,
    loss_data_parallel=1.88,
    loss_single=2.21,
    held_out=(
        *PLAIN.held_out,
        curve("data-parallel", 5.5, 2.9, 1.88),
        curve("one island alone", 5.5, 3.3, 2.21),
    ),
)
BARE = replace(PLAIN, islands=(replace(island("only"), loss=None),), train=(curve("only"),), held_out=())

both = pytest.mark.parametrize("report", [PLAIN, COMPARED], ids=["plain", "compared"])


def page_of(report: Report, folder: Path) -> str:
    html(report, folder / "report.html")
    return (folder / "report.html").read_text("utf-8")


def shown(report: Report) -> str:
    text = io.StringIO()
    Console(file=text, width=80).print(table(report))
    return text.getvalue()


def test_human_units() -> None:
    assert [human_bytes(n) for n in (0, 999, 1000, 3_210_000, 99_960_000, 999_600_000, 2.5e12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "3.2 MB",
        "100 MB",
        "1.0 GB",
        "2.5 TB",
    ]
    assert [human_count(n) for n in (0, 12.4, 26_100, 3_212_544, 7e9)] == ["0", "12", "26.1k", "3.2M", "7.0B"]
    assert [human_seconds(s) for s in (0, 62.4, 119.6, 725, 12_000)] == [
        "0 s",
        "62 s",
        "2 min 00 s",
        "12 min 05 s",
        "3 h 20 min",
    ]


def test_a_summary_holds_every_number_and_is_json() -> None:
    plain = summary(PLAIN)
    assert set(plain) == {
        "run_id",
        "islands",
        "parameters",
        "steps",
        "sync_every",
        "fragments",
        "rounds",
        "tokens",
        "bytes_up",
        "bytes_down",
        "bytes_data_parallel",
        "loss",
        "loss_unigram",
        "digests_agree",
        "seconds",
    }
    assert json.loads(json.dumps(plain))["islands"][0]["id"] == "east"
    assert set(summary(COMPARED)) - set(plain) == {"loss_data_parallel", "loss_single"}
    bare = summary(BARE)["islands"]
    assert isinstance(bare, tuple) and bare[0]["loss"] is None


def test_the_table_shows_islands_traffic_and_losses() -> None:
    text = shown(COMPARED)
    for figure in (
        "east 2 1.0M 13.1k 10 3.2 MB 3.1 MB 1.97",
        "together 4 2.0M 26.1k 10 6.4 MB 6.2 MB",
        "held-out loss 1.92 outer parameters",
        "1.88 data-parallel",
        "2.21 one island alone",
        "3.31 unigram",
        "bytes sent 6.4 MB",
        "479 MB data-parallel would have sent",
        "75x less",
        "digests agree",
    ):
        assert figure in " ".join(text.split())
    assert "one island alone" not in shown(PLAIN)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def test_the_table_says_when_things_went_badly() -> None:
    text = shown(replace(BARE, digests_agree=False, bytes_data_parallel=3_200_000))
    assert "DIFFER" in text
    assert "2.0x more" in text
    alone = shown(replace(BARE, bytes_data_parallel=0))
    assert "more" not in alone
    assert "data-parallel would have sent" not in alone


def test_the_table_takes_no_markup_from_an_id() -> None:
    assert "[red]x" in shown(replace(PLAIN, islands=(island("[red]x"),)))


@pytest.mark.parametrize("report", [PLAIN, COMPARED, BARE], ids=["plain", "compared", "bare"])
def test_the_plot_is_a_png_of_the_stated_size(report: Report, tmp_path: Path) -> None:
    plot(report, tmp_path / "plot.png")
    png = (tmp_path / "plot.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", png[16:24]) == tuple(round(inch * PLOT_DPI) for inch in PLOT_INCHES)
    assert len(png) > 10_000


@both
def test_the_page_needs_nothing_from_outside(report: Report, tmp_path: Path) -> None:
    page = page_of(report, tmp_path)
    assert not re.search(r"https?:|//[a-z]|\bsrc=|@import|<link|<script|\bhref=\"[^#]", page)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


@both
def test_the_page_shows_the_run(report: Report, tmp_path: Path) -> None:
    page = page_of(report, tmp_path)
    for text in (
        "2 islands trained one model",
        "75× less",
        "6.4 MB instead of 479 MB",
        "✓ agree",
        "sync.every_steps",
    ):
        assert text in page
    assert "<mark>def f(</mark>x):" in page
    assert "prefers-color-scheme: dark" in page and "var(--diloco)" in page
    assert ("one island alone" in page) == (report is COMPARED)
    assert "$" not in page


def test_every_element_of_the_page_is_closed(tmp_path: Path) -> None:
    class Nesting(HTMLParser):
        open: list[str]

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag not in {"meta", "br"}:
                self.open.append(tag)

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    nesting = Nesting()
    nesting.open = []
    nesting.feed(page_of(COMPARED, tmp_path))
    assert nesting.open == []


def test_the_page_escapes_all_that_comes_from_a_run(tmp_path: Path) -> None:
    evil = "<script>alert('$x')</script>"
    page = page_of(
        replace(
            PLAIN,
            run_id=evil,
            islands=(island(evil),),
            train=(curve(evil, 5.5, 2.0),),
            prompt=evil,
            sample=evil + evil,
            settings=((evil, evil, evil),),
        ),
        tmp_path,
    )
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(&#x27;$x&#x27;)&lt;/script&gt;") == 2 + 1 + 2 + 3


def test_the_page_says_when_islands_differ(tmp_path: Path) -> None:
    assert "✗ differ" in page_of(replace(BARE, digests_agree=False, fragments=4), tmp_path)


def test_write_leaves_three_whole_files(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    write(PLAIN, out)
    write(PLAIN, out)
    assert sorted(path.name for path in out.iterdir()) == ["plot.png", "report.html", "summary.json"]
    assert json.loads((out / "summary.json").read_text())["loss"] == 1.92
