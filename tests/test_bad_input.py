"""What users get wrong: each is told in one message what to do, with the documented exit code and no traceback."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.errors import ExitCode
from tests.processes import Ended, background, diloco, diloco_here, wait_until

RUN = '[run]\nid = "r"\nsteps = 8\n[sync]\nevery_steps = 4\n'
ISLAND = '[island]\nid = "a"\nmax_restarts = 0\n[data]\n'
NOBODY = "127.0.0.1:1"
"""An address at which nobody listens: the port takes a privilege, and its protocol is forgotten."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test works in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DILOCO_TRACEBACK", raising=False)
    write(tmp_path)


def write(folder: Path) -> None:
    """Writes correct settings, a text that is long enough and one that is not."""
    (folder / "run.toml").write_text(RUN)
    (folder / "island.toml").write_text(ISLAND + f"text = ['{folder}/text.txt']\n")
    (folder / "text.txt").write_text("To be, or not to be, that is the question.\n" * 5000)
    (folder / "tiny.txt").write_text("To be.")


def refused(ended: Ended, code: int, *says: str) -> None:
    """Checks that a command ended with `code` and one message, which contains `says`."""
    assert ended.code == code, ended
    assert ended.err.count("error: ") == 1, ended
    message = ended.err.partition("error: ")[2]
    assert all(part in message for part in says), message
    assert "Traceback" not in ended.out + ended.err


# -- settings -----------------------------------------------------------------------------------------------------

RUN_FAULTS = [
    ("unknown key", "[outer]\nlrr = 0.5\n", "run.toml: unknown key 'outer.lrr'; did you mean 'lr'?"),
    ("unknown table", "[outr]\nlr = 0.5\n", "run.toml: unknown key 'outr'; did you mean 'outer'?"),
    ("wrong type", '[outer]\nlr = "fast"\n', "run.toml: 'outer.lr': input should be a valid number"),
    ("out of range", "[outer]\nmomentum = 1.5\n", "run.toml: 'outer.momentum': input should be less than 1, not 1.5"),
    (
        "fragments",
        'every_steps = 10\nfragments = 3\nstrategy = "strided"\n',
        "sync.every_steps (10) is not a multiple of sync.fragments (3): set sync.every_steps=9 or sync.every_steps=12",
    ),
]
ISLAND_FAULTS = [
    ("unknown key", "[mesh]\nrank = 2\n", "island.toml: unknown key 'mesh.rank'; did you mean 'ranks'?"),
    ("wrong type", '[mesh]\nranks = "two"\n', "island.toml: 'mesh.ranks': input should be a valid integer"),
    ("out of range", "held_out = 0.7\n", "island.toml: 'data.held_out': input should be less than 0.5, not 0.7"),
    ("at odds", "batch_sequences = 5\n[mesh]\nranks = 2\n", "set data.batch_sequences=6"),
]


@pytest.mark.parametrize(("lines", "says"), [f[1:] for f in RUN_FAULTS], ids=[f[0] for f in RUN_FAULTS])
@pytest.mark.parametrize(
    "command", ["config check run.toml", "coordinator run.toml --state state --listen 127.0.0.1:0"]
)
def test_a_wrong_run_file(command: str, lines: str, says: str) -> None:
    Path("run.toml").write_text(RUN.replace("every_steps = 4\n", "") + lines)
    refused(diloco_here(*command.split()), ExitCode.USAGE, says)
    assert not Path("state").exists()


@pytest.mark.parametrize(
    ("index", "coordinators", "says"),
    [
        (
            2,
            ["a:1", "b:1"],
            "run.coordinator_index (2) names none of run.coordinators (2 of them): set run.coordinator",
        ),
        (1, [], "run.coordinator_index (1) names none of run.coordinators (1 of them)"),
        (0, ["a:1", "b:1", "c:1"], "run.coordinators (3 of them) are more than sync.fragments (2)"),
        (0, ["a:1", "a:1"], 'names an address twice, and each coordinator has its own: set run.coordinators=["a:1"]'),
        (0, ["a:1", "b"], "'run.coordinators.1': string should match pattern"),
    ],
)
def test_a_coordinator_that_the_run_has_no_place_for(index: int, coordinators: list[str], says: str) -> None:
    text = RUN.replace("[sync]", f"coordinators = {json.dumps(coordinators)}\n[sync]")
    Path("run.toml").write_text(text + "fragments = 2\nstrategy = 'strided'\n")
    command = f"coordinator run.toml --index {index} --state state --listen 127.0.0.1:0"
    refused(diloco_here(*command.split()), ExitCode.USAGE, says)
    assert not Path("state").exists()


@pytest.mark.parametrize(("lines", "says"), [f[1:] for f in ISLAND_FAULTS], ids=[f[0] for f in ISLAND_FAULTS])
@pytest.mark.parametrize("command", ["config check island.toml", "island island.toml --coordinator 127.0.0.1:1"])
def test_a_wrong_island_file(command: str, lines: str, says: str) -> None:
    Path("island.toml").write_text(ISLAND + lines)
    refused(diloco_here(*command.split()), ExitCode.USAGE, says)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("config check no.toml", "cannot read no.toml: No such file or directory"),
        ("coordinator no.toml --state state --listen 127.0.0.1:0", "cannot read no.toml: No such file or directory"),
        ("coordinator run.toml --state state --listen 127.0.0.1", "'127.0.0.1' is not HOST:PORT, for example"),
        ("coordinator run.toml --state state --listen :29400", "':29400' is not HOST:PORT, for example"),
        ("coordinator run.toml --state state --listen 127.0.0.1:99999", "'127.0.0.1:99999' is not HOST:PORT"),
        ("coordinator run.toml --state state --listen 127.0.0.1:0 --threads -1", "'--threads': -1 is not in the range"),
        ("island no.toml --coordinator 127.0.0.1:1", "cannot read no.toml: No such file or directory"),
        ("island island.toml", "no coordinator: give --coordinator HOST:PORT or set island.coordinator"),
        (
            "island island.toml --coordinator 127.0.0.1:1 --set data.text=['no.txt']",
            "cannot read no.txt (No such file or directory): correct data.text",
        ),
        ("status --coordinator nowhere", "'nowhere' is not HOST:PORT, for example"),
        ("status --coordinator 127.0.0.1:99999", "'127.0.0.1:99999' is not HOST:PORT"),
    ],
)
def test_a_wrong_command_line(command: str, says: str) -> None:
    refused(diloco_here(*command.split()), ExitCode.USAGE, says)
    assert not Path("state").exists()


# -- the demo -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--sync-every 10 --fragments 3", "sync.every_steps (10) is not a multiple of sync.fragments (3): set"),
        ("--steps 4 --sync-every 8 --fragments 1", "run.steps (4) ends before the first sync"),
        ("--sync-every 60 --fragments 6", "the model has too few layers; set sync.fragments="),
        ("--set model.vocab_size=255", "model.vocab_size (255) is below 256, and text is read as bytes: set"),
        ("--set shards.count=8", "the demo reads bytes and divides its text itself: set no tokenizer.kind"),
        ("--set model.vocab=255", "unknown key 'model.vocab'; did you mean 'vocab_size'?"),
        ("--ranks-per-island two", "--ranks-per-island 'two' is not a number, nor numbers such as 2,1,1"),
        ("--ranks-per-island 2,,1", "--ranks-per-island '2,,1' is not a number, nor numbers such as 2,1,1"),
        ("--ranks-per-island 2,0", "--ranks-per-island '2,0': every island needs at least 1 rank"),
        ("--ranks-per-island 2,1 --islands 3", "'2,1' names 2 islands, but --islands is 3"),
        ("--islands 0", "Invalid value for '--islands': 0 is not in the range"),
        ("--text tiny.txt", "the text has 6 tokens; one training and one held-out sequence of 65 tokens need 1282"),
        ("--text text.txt --islands 64 --set model.sequence_length=512", "64 shard(s) of at least one batch of 16"),
        ("--text no.txt", "cannot read no.txt (No such file or directory)"),
        ("--text text.txt --out text.txt", "cannot use the folder text.txt (Not a directory): name another with --out"),
        ("--text text.txt --out text.txt/x", "cannot use the folder text.txt/x (Not a directory): name another"),
        ("--text text.txt --out .", ". holds files that are not a demo's: name another folder with --out"),
    ],
)
def test_a_demo_that_cannot_be(options: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wan.demo.Processes", lambda _: pytest.fail("the demo starts processes"))
    before = sorted(Path().iterdir())
    refused(diloco_here("demo", *options.split()), ExitCode.USAGE, says)
    assert sorted(Path().iterdir()) == before


def test_a_demo_leaves_the_folder_of_a_real_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wan.demo.Processes", lambda _: pytest.fail("the demo starts processes"))
    for name in ("islands", "logs", "state"):
        Path("runs", name).mkdir(parents=True)
    Path("runs", "run.toml").write_text(RUN)
    refused(diloco_here("demo", "--text", "text.txt", "--out", "runs"), ExitCode.USAGE, "not a demo's")
    assert Path("runs", "run.toml").read_text() == RUN


# -- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["export --to out --state", "eval", "generate"])
@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("missing", "no state folder at missing: name the --state of a coordinator"),
        ("text.txt", "no state folder at text.txt: name the --state of a coordinator"),
        ("empty", "empty has no snapshot yet"),
        ("foreign", "foreign is not a folder that `diloco export` wrote"),
        ("damaged", "damaged is not a folder that `diloco export` wrote, or is damaged"),
    ],
)
def test_no_checkpoint(command: str, folder: str, says: str) -> None:
    for name in ("empty", "foreign", "damaged"):
        Path(name).mkdir()
    Path("foreign", "config.json").write_text("{}")
    for name in ("config.json", "diloco.json"):
        Path("damaged", name).write_text(json.dumps({"model": {"dim": 3}, "versions": [1]}))
    Path("damaged", "model.safetensors").write_bytes(b"not safetensors")
    refused(diloco_here(*command.split(), folder), ExitCode.USAGE, says)
    assert not Path("out").exists()


def test_nobody_answers_a_status() -> None:
    ended = diloco_here("status", "--coordinator", NOBODY, "--timeout", "1")
    refused(ended, ExitCode.UNREACHABLE, f"no coordinator answers at {NOBODY} (Connection refused)")


# -- processes ----------------------------------------------------------------------------------------------------

COORDINATORS = {
    "good": [],
    "vocabulary": ["model.vocab_size=255"],
    "fragments": ["sync.strategy=strided", "sync.every_steps=6", "sync.fragments=6"],
}
"""Overrides of the coordinators' run files."""

COMMANDS = {
    "short text": "island {folder}/island.toml --coordinator {good} --set data.text=['{folder}/tiny.txt']",
    "another run": "island {folder}/island.toml --coordinator {good} --set island.run_id=other --set mesh.ranks=2",
    "vocabulary": "island {folder}/island.toml --coordinator {vocabulary}",
    "fragments": "island {folder}/island.toml --coordinator {fragments}",
    "nobody": "island {folder}/island.toml --coordinator {nobody} --set island.connect_timeout_s=2",
    "port": "coordinator {folder}/run.toml --state {folder}/other --listen {good}",
    "state": "coordinator {folder}/run.toml --state {folder}/good --listen 127.0.0.1:0",
}
"""Commands that fail; `{good}` is the address of that coordinator, `{nobody}` one where none is."""


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How each of `COMMANDS` ended. They run at the same time, since most of it is starting up."""
    folder = tmp_path_factory.mktemp("endings")
    write(folder)
    where = {"folder": str(folder), "nobody": NOBODY}
    with ExitStack() as stack:
        for name, overrides in COORDINATORS.items():
            settings = [part for override in overrides for part in ("--set", override)]
            command = ["coordinator", f"{folder}/run.toml", "--state", f"{folder}/{name}", "--listen", "127.0.0.1:0"]
            stack.enter_context(background(*command, *settings, log=folder / f"{name}.log"))
        for name in COORDINATORS:
            address = folder / name / "address"
            wait_until(address.exists, f"{address} exists")
            where[name] = address.read_text()
        with ThreadPoolExecutor(len(COMMANDS)) as pool:
            ends = pool.map(lambda command: diloco(*command.format(**where).split()), COMMANDS.values())
            return dict(zip(COMMANDS, ends, strict=True))


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (
            "short text",
            ExitCode.USAGE,
            "the text has 6 tokens; one training and one held-out sequence of 65 tokens need",
        ),
        ("vocabulary", ExitCode.USAGE, "model.vocab_size (255) is below 256, and text is read as bytes: set"),
        ("fragments", ExitCode.USAGE, "the model has too few layers; set sync.fragments="),
        ("nobody", ExitCode.UNREACHABLE, f"no coordinator answers at {NOBODY} (Connection refused)"),
        ("port", ExitCode.ENVIRONMENT, "the port is in use or the address is not this machine's; name another with"),
        ("state", ExitCode.ENVIRONMENT, "is in use by another coordinator: stop it or name another --state"),
    ],
)
def test_what_only_a_process_finds_out(command: str, code: int, says: str, endings: dict[str, Ended]) -> None:
    refused(endings[command], code, says)


def test_every_rank_says_what_the_coordinator_refused(endings: dict[str, Ended]) -> None:
    ended = endings["another run"]
    assert ended.code == ExitCode.REFUSED
    messages = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(set(messages)) == 1
    assert "check the address or island.run_id" in messages[0]
    assert "Traceback" not in ended.out + ended.err
