"""What a finished run looks like: the numbers as JSON, as a table, as a plot and as one page of HTML.

Everything here is a function of one `Report`: losses in nats per byte, sizes in bytes, durations in seconds.
"""

from __future__ import annotations

import html as markup
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT_INCHES = (12.0, 5.4)
PLOT_DPI = 150

# Okabe and Ito's blue and vermillion and Tol's purple: told apart with every common kind of colour blindness.
# The page replaces each colour by the CSS variable of its name, so that dark mode has colours of its own.
_INK = {
    "ink": "#1f2328",
    "muted": "#656d77",
    "line": "#e3e6ea",
    "diloco": "#0072b2",
    "island": "#8fbcd8",
    "parallel": "#d55e00",
    "alone": "#aa4499",
}
_CURVE_INK = {"data-parallel": "parallel", "one island alone": "alone"}


@dataclass(frozen=True, kw_only=True)
class IslandRow:
    """What one island did."""

    id: str
    ranks: int
    """Processes, one GPU each where there are GPUs."""
    tokens: int
    """Training tokens this island consumed."""
    rounds: int
    """Rounds this island contributed to."""
    bytes_up: int
    """Bytes from this island to the coordinator."""
    bytes_down: int
    """Bytes from the coordinator to this island."""
    loss: float | None
    """Last training loss, nats per byte; None before the first."""
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A loss over the course of training: `tokens` and `loss` have one entry per point."""

    name: str
    tokens: tuple[int, ...]
    """Training tokens of all islands together, ascending."""
    loss: tuple[float, ...]
    """Nats per byte."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A finished run."""

    run_id: str
    islands: tuple[IslandRow, ...]
    parameters: int
    """Parameters of the model."""
    steps: int
    """Inner steps of each island."""
    sync_every: int
    """Inner steps between two synchronisations of one fragment."""
    fragments: int
    """Parts of the model that are synchronised separately."""
    rounds: int
    """Outer updates of the run."""
    tokens: int
    """Training tokens of all islands together."""
    bytes_up: int
    """Bytes from all islands to the coordinator."""
    bytes_down: int
    """Bytes from the coordinator to all islands."""
    bytes_data_parallel: int
    """Bytes that averaging gradients at every step would have sent: a ring all-reduce of fp32
    gradients among the islands, each byte counted at its sender."""
    loss: float
    """Loss of the outer parameters on held-out text, nats per byte."""
    loss_unigram: float
    """Loss of byte frequencies alone on the same text, nats per byte."""
    loss_data_parallel: float | None
    """Loss of data-parallel training on the same text, where it was run to compare."""
    loss_single: float | None
    """Loss of one island that trained alone, where it was run to compare."""
    digests_agree: bool
    """Whether every island ended with the same outer parameters, bit for bit."""
    seconds: float
    """Duration of the training."""
    train: tuple[Curve, ...]
    """Training loss, one curve per island."""
    held_out: tuple[Curve, ...]
    """Held-out loss: the outer parameters first, then what they are compared with."""
    prompt: str
    sample: str
    """What the model wrote after `prompt`."""
    settings: tuple[tuple[str, str, str], ...]
    """(dotted key, value, where the value came from) of every setting."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that the islands sent, each counted at its sender."""
        return self.bytes_up

    @property
    def saving(self) -> float:
        """How many times more data-parallel training would have sent."""
        return self.bytes_data_parallel / max(self.bytes_sent, 1)

    @property
    def compared(self) -> tuple[tuple[str, float], ...]:
        """(name, held-out loss in nats per byte) of what the run was compared with."""
        pairs = (("data-parallel", self.loss_data_parallel), ("one island alone", self.loss_single))
        return tuple((name, loss) for name, loss in pairs if loss is not None)


def summary(report: Report) -> dict[str, object]:
    """The numbers of a run, ready for JSON: no curves, no text, and no comparison that was not made."""
    left_out = {"train", "held_out", "prompt", "sample", "settings"}
    return {k: v for k, v in asdict(report).items() if k not in left_out and v is not None}


def human_bytes(n: float) -> str:
    """Bytes in decimal units: `3.2 MB`."""
    value, prefix = _scale(n, ("", "k", "M", "G", "T", "P"))
    return f"{value} {prefix}B"


def human_count(n: float) -> str:
    """A count in thousands, millions or billions: `26.1k`."""
    return "".join(_scale(n, ("", "k", "M", "B", "T")))


def human_seconds(s: float) -> str:
    """A duration: `62 s`, `12 min 05 s`, `3 h 20 min`."""
    seconds = round(s)
    if seconds < 120:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 120:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _scale(n: float, prefixes: Sequence[str]) -> tuple[str, str]:
    if n < 999.5:
        return f"{n:.0f}", prefixes[0]
    power = 0
    while n >= 999.5 and power < len(prefixes) - 1:
        n /= 1000
        power += 1
    return f"{n:.1f}" if n < 99.95 else f"{n:.0f}", prefixes[power]


def _times(ratio: float, sign: str) -> str:
    """`38x less`, or `1.3x more` where nothing was saved."""
    factor, word = (ratio, "less") if ratio >= 1 else (1 / ratio, "more")
    return f"{factor:.1f}{sign} {word}" if factor < 9.95 else f"{factor:,.0f}{sign} {word}"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _headline(report: Report) -> str:
    islands = _count(len(report.islands), "island")
    if not report.bytes_data_parallel:
        return f"{islands} trained one model"
    return f"{islands} trained one model and sent {_times(report.saving, '×')} than data-parallel"


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.2f}"


def _cells(report: Report) -> list[tuple[str, ...]]:
    """The table of islands as text: a header, one row per island, the total."""
    return [
        ("island", "ranks", "tokens", "tok/s", "rounds", "sent up", "sent down", "train loss"),
        *(
            (
                row.id,
                str(row.ranks),
                human_count(row.tokens),
                human_count(row.tokens_per_second),
                str(row.rounds),
                human_bytes(row.bytes_up),
                human_bytes(row.bytes_down),
                _loss(row.loss),
            )
            for row in report.islands
        ),
        (
            "together",
            str(sum(row.ranks for row in report.islands)),
            human_count(report.tokens),
            human_count(sum(row.tokens_per_second for row in report.islands)),
            str(report.rounds),
            human_bytes(report.bytes_up),
            human_bytes(report.bytes_down),
            "",
        ),
    ]


def table(report: Report) -> RenderableType:
    """The run for a terminal: a row per island, then traffic and losses against what they are measured by."""
    header, *rows, total = _cells(report)
    islands = Table(box=box.SIMPLE_HEAD, show_footer=True, header_style="dim", footer_style="bold", pad_edge=False)
    islands.add_column(header[0], total[0], overflow="fold")
    for name, sums in zip(header[1:], total[1:], strict=True):
        islands.add_column(name, sums, justify="right", no_wrap=True)
    for row in rows:
        islands.add_row(*(Text(cell) for cell in row))

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(justify="right")
    facts.add_column()
    facts.add_row("held-out loss", Text(f"{report.loss:.2f}", style="bold"), "outer parameters, nats per byte")
    for name, loss in (*report.compared, ("unigram", report.loss_unigram)):
        facts.add_row("", f"{loss:.2f}", name)
    facts.add_row()
    facts.add_row("bytes sent", Text(human_bytes(report.bytes_sent), style="bold"), "by the islands")
    if report.bytes_data_parallel:  # one island alone would have sent nothing
        saving = Text(_times(report.saving, "x"), style="bold green" if report.saving >= 1 else "bold yellow")
        facts.add_row("", human_bytes(report.bytes_data_parallel), "data-parallel would have sent")
        facts.add_row("", saving)
    facts.add_row()
    if report.digests_agree:
        facts.add_row("digests", Text("agree", style="green"), "every island holds the same outer parameters")
    else:
        facts.add_row("digests", Text("DIFFER", style="bold red"), "the islands hold different outer parameters")
    return Group(islands, Padding(facts, (0, 1)))


def plot(report: Report, path: Path) -> None:
    """Writes a PNG of `PLOT_INCHES` at `PLOT_DPI`: loss against training tokens, and bytes sent beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=PLOT_INCHES, facecolor="white")
    figure.text(0.05, 0.925, _headline(report), fontsize=16, weight="bold", color=_INK["ink"])
    left, right = _axes(figure, (0.05, 0.12, 0.51, 0.62)), _axes(figure, (0.755, 0.12, 0.215, 0.62))
    _draw_loss(left, report)
    _draw_bytes(right, report)
    _title(left, "Loss on held-out text", "nats per byte; thin lines: training loss of each island")
    _title(right, "Bytes between the islands", "sent by the islands, log scale")
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=PLOT_DPI)
    _publish(path, png.getvalue())


def _axes(figure: Figure, rectangle: tuple[float, float, float, float]) -> Axes:
    """Axes with horizontal grid lines and nothing else, in the muted ink."""
    axes = figure.add_axes(rectangle)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelcolor=_INK["muted"], labelsize=9.5, which="both")
    axes.grid(axis="y", color=_INK["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def _title(axes: Axes, title: str, subtitle: str) -> None:
    for text, above, size, ink, weight in (
        (title, 30, 12, "ink", "bold"),
        (subtitle, 14, 9.5, "muted", "normal"),
    ):
        axes.annotate(
            text,
            (0, 1),
            (0, above),
            "axes fraction",
            "offset points",
            size=size,
            color=_INK[ink],
            weight=weight,
        )


def _draw_loss(axes: Axes, report: Report) -> None:
    """Held-out curves over the islands' faint training curves, each named at its right end."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for curve in report.train:
        axes.plot(curve.tokens, curve.loss, color=_INK["island"], linewidth=0.8, alpha=0.6, zorder=2)
    axes.axhline(report.loss_unigram, color=_INK["muted"], linewidth=1.2, linestyle=(0, (4, 3)), zorder=3)
    labels = [(report.loss_unigram, "unigram", "muted")]
    for curve in (c for c in report.held_out if c.tokens):
        ink = _CURVE_INK.get(curve.name, "diloco")
        bold = ink == "diloco"
        axes.plot(
            curve.tokens,
            curve.loss,
            color=_INK[ink],
            linewidth=2.6 if bold else 1.8,
            marker="o",
            markersize=4.5 if bold else 3,
            zorder=5 if bold else 4,
        )
        labels.append((curve.loss[-1], curve.name.partition(",")[0], ink))

    curves = [curve for curve in (*report.train, *report.held_out) if curve.tokens]
    losses = [report.loss_unigram, *(loss for curve in curves for loss in curve.loss)]
    # The first steps, from random parameters, would take most of the height: curves may enter from above.
    top = min(max(losses), max(1.3 * report.loss_unigram, *(value for value, _, _ in labels)))
    space = 0.06 * (top - min(losses)) or 0.1
    axes.set_ylim(min(losses) - space, top + space)
    axes.set_xlim(0, 1.01 * max([1, *(curve.tokens[-1] for curve in curves)]))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: human_count(n).replace(".0", "")))
    axes.set_xlabel("training tokens of all islands", color=_INK["muted"], size=9.5, labelpad=8)
    _label_ends(axes, labels)


def _label_ends(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Writes each (value, name, ink) right of the axes at its height, moved apart where they would touch."""
    from matplotlib.transforms import ScaledTranslation

    labels = sorted(labels)
    figure = axes.get_figure(root=True)
    assert figure is not None
    low, high = axes.get_ylim()
    points = 72 * figure.get_figheight() * axes.get_position().height
    gap = 29 * (high - low) / points
    heights = _spread([value for value, _, _ in labels], gap, low + gap / 2)
    margin = axes.get_yaxis_transform() + ScaledTranslation(9 / 72, 0, figure.dpi_scale_trans)
    for (value, name, ink), height in zip(labels, heights, strict=True):
        for text, side, size, weight in ((f"{value:.2f}", "bottom", 11, "bold"), (name, "top", 9, "normal")):
            axes.text(
                1,
                height,
                text,
                size=size,
                weight=weight,
                color=_INK[ink],
                va=side,
                transform=margin,
                parse_math=False,
            )


def _spread(values: list[float], gap: float, floor: float) -> list[float]:
    """Ascending values, moved until neighbours are `gap` apart and the lowest is not below `floor`."""
    places = list(values)
    for _ in range(100):
        places[0] = max(places[0], floor)
        for i in range(len(places) - 1):
            overlap = gap - (places[i + 1] - places[i])
            if overlap > 0:
                places[i] -= overlap / 2
                places[i + 1] += overlap / 2
    return places


def _draw_bytes(axes: Axes, report: Report) -> None:
    """Two bars on a log scale, each with its value on top."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    bars = ("DiLoCo", report.bytes_sent, "diloco"), ("data-parallel", report.bytes_data_parallel, "parallel")
    sizes = [max(size, 1) for _, size, _ in bars]
    axes.set_yscale("log")
    axes.set_ylim(min(sizes) / 8, max(sizes) * 2.5)
    axes.set_xlim(-0.5, 1.5)
    axes.bar((0, 1), sizes, width=0.62, color=[_INK[ink] for _, _, ink in bars])
    for x, (size, (_, exact, ink)) in enumerate(zip(sizes, bars, strict=True)):
        axes.annotate(
            human_bytes(exact),
            (x, size),
            (0, 6),
            textcoords="offset points",
            ha="center",
            size=11,
            weight="bold",
            color=_INK[ink],
        )
    axes.set_xticks((0, 1), [name for name, _, _ in bars])
    axes.tick_params(axis="x", labelcolor=_INK["ink"], labelsize=10, pad=7)
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda n, _: human_bytes(n).replace(".0", "")))
    axes.yaxis.set_minor_formatter(NullFormatter())


def html(report: Report, path: Path) -> None:
    """Writes the run as one page that needs nothing else: no script, no font, no picture from outside."""
    header, *rows, total = _cells(report)
    template = Template(resources.files("wan").joinpath("report.html").read_text("utf-8"))
    page = template.substitute(
        run_id=_escape(report.run_id),
        headline=_escape(_headline(report)),
        story=_escape(_story(report)),
        tiles="".join(_tile(*tile) for tile in _tiles(report)),
        loss_wide=_svg(report, _draw_loss, (6.4, 3.7), (0.06, 0.14, 0.73, 0.84)),
        loss_narrow=_svg(report, _draw_loss, (4.5, 4.0), (0.08, 0.13, 0.61, 0.85)),
        bytes=_svg(report, _draw_bytes, (3.1, 3.8), (0.22, 0.1, 0.77, 0.88)),
        header=_row(header, "th"),
        rows="".join(_row(row) for row in rows),
        total=_row(total),
        prompt=_escape(report.prompt),
        sample=_escape(report.sample.removeprefix(report.prompt)),
        settings="".join(_row(row) for row in report.settings),
    )
    _publish(path, page.encode())


def _escape(text: str) -> str:
    return markup.escape(text, quote=True)


def _row(cells: Iterable[str], tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{_escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"


def _tiles(report: Report) -> list[tuple[str, str, str, str]]:
    """(what, number, explanation, mood) of the headline numbers."""
    against = [f"{name} {loss:.2f}" for name, loss in (("unigram", report.loss_unigram), *report.compared)]
    every = f"one every {_count(report.sync_every, 'step')}"
    parts = "" if report.fragments == 1 else f" for each of {report.fragments} fragments"
    return [
        ("held-out loss", f"{report.loss:.2f}", "nats per byte; " + ", ".join(against), ""),
        (
            "traffic",
            _times(report.saving, "×") if report.bytes_data_parallel else human_bytes(report.bytes_sent),
            f"{human_bytes(report.bytes_sent)} instead of {human_bytes(report.bytes_data_parallel)}"
            if report.bytes_data_parallel
            else "sent to the coordinator",
            "",
        ),
        ("rounds", f"{report.rounds:,}", every + parts, ""),
        ("digests", "✓ agree", "the same outer parameters on every island, bit for bit", "good")
        if report.digests_agree
        else ("digests", "✗ differ", "the islands do not hold the same outer parameters", "bad"),
    ]


def _tile(what: str, number: str, explanation: str, mood: str) -> str:
    what, number, explanation = _escape(what), _escape(number), _escape(explanation)
    return f'<div class="tile {mood}"><h3>{what}</h3><b>{number}</b><p>{explanation}</p></div>\n'


def _story(report: Report) -> str:
    """What happened, in a paragraph."""
    parts = "" if report.fragments == 1 else f" The model's {report.fragments} fragments take turns."
    parallel = (
        " Averaging gradients at every step, as data-parallel training does, would have sent "
        f"{human_bytes(report.bytes_data_parallel)}."
        if report.bytes_data_parallel
        else ""
    )
    compared = " and ".join(f"{name} reached {loss:.2f}" for name, loss in report.compared)
    sentences = (
        f"The model has {human_count(report.parameters)} parameters, and each island trained it for "
        f"{_count(report.steps, 'step')}.",
        f"Every {_count(report.sync_every, 'step')} an island sent the coordinator what it had learned "
        f"since, its pseudo-gradient; the coordinator merged them and sent the new parameters back.{parts}",
        f"For all of this {_count(len(report.islands), 'island')} sent {human_bytes(report.bytes_sent)}.{parallel}",
        f"After {human_seconds(report.seconds)} and {human_count(report.tokens)} training tokens the merged "
        f"model predicts text it never saw with {report.loss:.2f} nats per byte, where byte frequencies "
        f"alone (unigram) need {report.loss_unigram:.2f}.",
        f"For comparison, {compared}." if compared else "",
    )
    return " ".join(sentences).strip()


def _svg(
    report: Report,
    draw: Callable[[Axes, Report], None],
    inches: tuple[float, float],
    rectangle: tuple[float, float, float, float],
) -> str:
    """A chart to put inside a page: colours are CSS variables, text is text, no outside address is named.

    Args:
        draw: `(axes, report)` draws the chart.
        inches: width and height.
        rectangle: left, bottom, width and height of the axes as fractions of the figure.
    """
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches)
    draw(_axes(figure, rectangle), report)
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": str(inches)}):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]
    foreign = r'<metadata>.*?</metadata>|<style.*?</style>|\sxmlns(:xlink)?="[^"]*"|font-family: [^;]*; '
    svg = re.sub(foreign, "", svg, flags=re.DOTALL)
    for name, colour in _INK.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def write(report: Report, out: Path) -> None:
    """Writes `summary.json`, `plot.png` and `report.html` into the folder `out`, each whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    _publish(out / "summary.json", (json.dumps(summary(report), indent=2) + "\n").encode())
    plot(report, out / "plot.png")
    html(report, out / "report.html")


def _publish(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    part.replace(path)
