"""`diloco demo`, `diloco export`, `diloco eval` and `diloco generate`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import click

from diloco.errors import ConfigError, ExitCode

_TEXT = click.option("--text", multiple=True, metavar="FILE_OR_FOLDER", help="Text; the Python library's by default.")

_TOKENIZER = click.option(
    "--tokenizer", default="", metavar="NAME", help="Of a run that does not read bytes: its `tokenizer.name`."
)


@click.command()
@click.option("--islands", type=click.IntRange(1, 64), help="Islands, 4 by default.")
@click.option(
    "--ranks-per-island", default="1", show_default=True, metavar="N[,N...]", help="Processes of each island."
)
@click.option("--steps", type=click.IntRange(1), default=500, show_default=True, help="Inner steps of each island.")
@click.option("--sync-every", type=click.IntRange(1), default=50, show_default=True, help="H: inner steps per sync.")
@click.option("--fragments", type=click.IntRange(1), default=2, show_default=True, help="Parts synchronised apart.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option("--text", multiple=True, metavar="FILE_OR_FOLDER", help="Train on this text; may be given repeatedly.")
@click.option("--out", default="diloco-demo", show_default=True, metavar="DIR", help="Folder of the results.")
@click.option("--compare", is_flag=True, help="Also train data-parallel, and one island alone, on as many tokens.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting of the run.")
def demo(
    islands: int | None,
    ranks_per_island: str,
    steps: int,
    sync_every: int,
    fragments: int,
    seed: int,
    text: tuple[str, ...],
    out: str,
    compare: bool,
    overrides: tuple[str, ...],
) -> None:
    """Train one small model on several islands of this machine, and show what came of it.

    By default it is a byte-level language model on the sources of the Python standard library.
    """
    with _interrupt_at_once():
        from rich.console import Console

        from wan.demo import Demo, parse_ranks, run

        console = Console(highlight=False)
        run(
            Demo(
                ranks=parse_ranks(ranks_per_island, islands),
                steps=steps,
                sync_every=sync_every,
                fragments=fragments,
                seed=seed,
                text=text,
                out=Path(out),
                compare=compare,
                overrides=overrides,
            ),
            console,
        )
    results = f"report: {out}/report.html   plot: {out}/plot.png   numbers: {out}/summary.json"
    console.print(results, soft_wrap=True, markup=False)


@contextmanager
def _interrupt_at_once() -> Iterator[None]:
    """Within it, Ctrl-C ends the process on the spot, where no other handler takes over.

    As an exception it would come to nothing, or to another error, where it hits the import of an extension module.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, frame: object) -> NoReturn:
    os.write(2, b"error: interrupted\n")
    os._exit(ExitCode.INTERRUPTED)


@click.command()
@click.option(
    "--state",
    "states",
    required=True,
    multiple=True,
    metavar="DIR",
    help="A coordinator's state folder; give those of all where the run has several.",
)
@click.option("--to", required=True, metavar="OUT", help="Folder to make.")
def export(states: tuple[str, ...], to: str) -> None:
    """Write the outer parameters as safetensors, which transformers loads where it knows such a model."""
    from wan.checkpoint import export as write
    from wan.checkpoint import load

    checkpoint = load(*map(Path, states))
    write(checkpoint, Path(to))
    click.echo(
        f"{to}: {sum(t.numel() for t in checkpoint.tensors.values()):,} parameters at versions "
        f"{', '.join(map(str, checkpoint.versions))}"
    )


@click.command("eval")
@click.argument("checkpoint")
@_TEXT
@_TOKENIZER
@click.option("--sequences", type=click.IntRange(1), default=256, show_default=True, help="Held-out sequences.")
def evaluate(checkpoint: str, text: tuple[str, ...], tokenizer: str, sequences: int) -> None:
    """Loss of CHECKPOINT (a state folder or an exported one) on the held-out part of a text."""
    from contextlib import nullcontext

    from island.data import named, packed_text
    from island.group import Group
    from island.parallel import Engine
    from island.trainer import held_out_loss
    from wan.checkpoint import load

    loaded = load(Path(checkpoint))
    data = packed_text(text, loaded.model, named(tokenizer, loaded.model.vocab_size))
    loss = held_out_loss(Engine.around(loaded.built()), data, sequences, Group(), nullcontext())
    unit = "token" if tokenizer else "byte"
    click.echo(f"loss {loss:.4f} nats per {unit} on held-out text (unigram {data.unigram_loss():.4f})")


@click.command()
@click.argument("checkpoint")
@click.option("--prompt", default="def ", show_default=True, help="Text to continue.")
@_TOKENIZER
@click.option("--length", type=click.IntRange(1), default=400, show_default=True, help="Tokens to write.")
@click.option("--temperature", type=click.FloatRange(0), default=0.8, show_default=True, help="0 takes the likeliest.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def generate(checkpoint: str, prompt: str, tokenizer: str, length: int, temperature: float, seed: int) -> None:
    """Continue a text with CHECKPOINT (a state folder or an exported one)."""
    import torch

    from island.data import named
    from island.model import generate as sample
    from wan.checkpoint import load

    if not prompt:
        raise ConfigError("--prompt is empty: give at least one character to continue")
    loaded = load(Path(checkpoint))
    using = named(tokenizer, loaded.model.vocab_size)
    tokens = torch.tensor(using.encode([prompt])[0].astype("int64"))
    written = sample(loaded.built(), tokens, length, temperature, seed, loaded.model.sequence_length)
    click.echo(using.decode(written.tolist()))
