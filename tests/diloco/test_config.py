"""The run's settings: every rule says how to keep it, and equal settings have equal digests."""

from __future__ import annotations

import re

import pytest

from diloco.config import PRESETS, RunConfig, load_run
from diloco.errors import ConfigError
from diloco.settings import leaves, to_toml

MINIMAL = '[run]\nid = "r"\n'

RULES = [
    (["model.dim=65"], ["model.dim", "model.heads"]),
    (["model.dim=2", "model.heads=3", "model.kv_heads=3"], ["model.dim", "model.heads"]),
    (["model.dim=36", "model.heads=6", "model.kv_heads=4"], ["model.kv_heads", "model.heads"]),
    (["sync.fragments=2"], ["sync.strategy", "sync.fragments"]),
    (
        ["sync.strategy=strided", "sync.fragments=3", "sync.offsets_steps=[1, 1, 501]"],
        ["sync.offsets_steps", "sync.fragments", "sync.every_steps"],
    ),
    (["sync.offsets_steps=[1, 2]"], ["sync.offsets_steps", "sync.fragments", "sync.every_steps"]),
    (["sync.strategy=strided", "sync.fragments=3"], ["sync.every_steps", "sync.fragments"]),
    (
        ["sync.strategy=strided", "sync.fragments=3", "sync.every_steps=2"],
        ["sync.every_steps", "sync.fragments"],
    ),
    (["sync.overlap_steps=500"], ["sync.overlap_steps", "sync.every_steps"]),
    (["rounds.grace_s=601.5"], ["rounds.grace_s", "rounds.deadline_s"]),
    (["run.steps=499"], ["run.steps", "sync.every_steps"]),
    (["inner.options.momentum=0.9"], ["inner.options", "inner.optimizer"]),
    (["inner.matrix_lr=0.02"], ["inner.matrix_lr", "inner.optimizer"]),
    (
        ["inner.schedule=wsd", "inner.warmup_steps=900", "inner.decay_steps=101"],
        ["inner.warmup_steps", "inner.decay_steps", "run.steps"],
    ),
    (
        ["inner.schedule=wsd", "inner.warmup_steps=1200", "inner.decay_steps=1"],
        ["inner.warmup_steps", "inner.decay_steps", "run.steps"],
    ),
    (["rounds.quorum=3", "rounds.start_islands=2"], ["rounds.quorum", "rounds.start_islands"]),
    (["run.coordinator_index=1"], ["run.coordinator_index", "run.coordinators"]),
    (["run.coordinators=['a:1', 'b:1']"], ["run.coordinators", "sync.fragments"]),
    (["run.coordinators=['a:1', 'a:1']"], ["run.coordinators"]),
]
"""Overrides that break one rule between settings, and the settings its message must name."""


def fixes(message: str) -> list[str]:
    """The KEY=VALUE that a message says to set, each one an alternative."""
    advice = message.rpartition(": set ")[2]
    return re.findall(r"[a-z_]+\.[a-z_]+=(?:\[[^]]*\]|[^\s,]+)", advice)


@pytest.mark.parametrize(("overrides", "fields"), RULES)
def test_a_broken_rule_names_its_settings_and_every_fix_it_offers_is_accepted(
    overrides: list[str], fields: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(MINIMAL, "run.toml", overrides)
    message = str(caught.value)
    rule = message.rpartition(": set ")[0]
    assert message.count("\n") == 0
    assert all(field in rule for field in fields)
    assert message.startswith("--set: ")
    assert fixes(message)
    for fix in fixes(message):
        assert any(fix.startswith(f"{field}=") for field in fields)
        load_run(MINIMAL, "run.toml", [*overrides, fix])


def test_a_broken_rule_names_every_source_that_has_a_part_in_it() -> None:
    with pytest.raises(ConfigError, match=r"^preset streaming, --set: sync\.every_steps \(101\)"):
        load_run(f'preset = "streaming"\n{MINIMAL}', "run.toml", ["sync.every_steps=101"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dim=0", "'model.dim': input should be greater than or equal to 1, not 0"),
        ("outer.momentum=1", "'outer.momentum': input should be less than 1, not 1"),
        ("outer.lr=0", "'outer.lr': input should be greater than 0, not 0"),
        ("sync.alpha=1.5", "'sync.alpha': input should be less than or equal to 1, not 1.5"),
        ("wire.up=fp8", "wire.up ('fp8') is no codec: set it to auto, auto:CODEC or one of fp32, bf16, "),
        ("wire.chunk_bytes=8388608", "'wire.chunk_bytes': input should be less than or equal to 4194304"),
        ("rounds.deadline_s=inf", "'rounds.deadline_s': input should be a finite number, not inf"),
        ("run.id='a b'", "'run.id': string should match pattern"),
        ("run.seed=2147483648", "'run.seed': input should be less than 2147483648"),
        ("inner.betas=[0.9]", "'inner.betas.1'"),
        ("inner.betas=[0.9, 1]", "'inner.betas.1': input should be less than 1, not 1"),
        ("inner.optimizer=adam", "'inner.optimizer': string should match pattern"),
        ("inner.optimizer=my.module:", "'inner.optimizer': string should match pattern"),
        ("inner.options={a = {b = 1}}", "'inner.options.a"),
        ("sync.every=3", "unknown key 'sync.every'; did you mean 'every_steps'?"),
    ],
)
def test_a_value_out_of_range_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(MINIMAL, "run.toml", [override])
    assert message in str(caught.value)


def test_the_run_needs_nothing_but_an_id() -> None:
    with pytest.raises(ConfigError, match=r"^'run\.id' is required: .* --set run\.id=VALUE$"):
        load_run("", "run.toml")
    assert load_run("", "run.toml", ["run.id=r"]).value == load_run(MINIMAL, "run.toml").value


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_values_and_the_file_overrides_them(name: str) -> None:
    resolved = load_run(f'preset = "{name}"\n{MINIMAL}[outer]\nlr = 0.25\n[wire]\n', "run.toml")
    rows = {key: (value, origin) for key, value, origin in resolved.rows()}
    expected = dict(leaves(PRESETS[name]))
    assert rows.pop("outer.lr") == (0.25, "run.toml")
    assert expected.pop("outer.lr") != 0.25
    assert {key: rows[key] for key in expected} == {k: (v, f"preset {name}") for k, v in expected.items()}


@pytest.mark.parametrize("preset", ['"diloko"', "3", '["diloco"]', "{}"])
def test_an_unknown_preset_is_an_error_that_lists_the_known_ones(preset: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml: unknown preset .*; known: diloco, streaming, sparse"):
        load_run(f"preset = {preset}\n{MINIMAL}", "run.toml")


def test_fragments_start_evenly_spread_unless_offsets_are_given() -> None:
    three = ["sync.strategy=strided", "sync.fragments=3", "sync.every_steps=30"]
    assert load_run(MINIMAL, "run.toml", three).value.sync.offsets == (10, 20, 30)
    given = [*three, "sync.offsets_steps=[1, 30, 2]"]
    assert load_run(MINIMAL, "run.toml", given).value.sync.offsets == (1, 30, 2)


EXAMPLES = [
    [],
    ["sync.strategy=strided", "sync.fragments=2", "sync.offsets_steps=[7, 250]", "inner.betas=[0.8, 0]"],
    ["inner.optimizer=a.b:C.D", "inner.options={a = [1, 0.5, true], b = 'x', c = 1e-9, d = false}"],
    ['sync.embeddings=["*é😀*", "tab\\t", "quote\\""]', "model.norm_eps=1e-30", "rounds.lease_s=1e17"],
]


@pytest.mark.parametrize("overrides", EXAMPLES)
def test_settings_survive_their_own_toml(overrides: list[str]) -> None:
    config = load_run(MINIMAL, "run.toml", overrides).value
    again = load_run(to_toml(config), "text").value
    assert again == config
    assert again.digest == config.digest


def test_the_digest_tells_settings_apart_and_nothing_else() -> None:
    def digest(text: str, *overrides: str) -> str:
        return load_run(text, "run.toml", overrides).value.digest

    assert digest(MINIMAL) == digest(MINIMAL, "outer.lr=0.7", "model.dim=64")
    assert digest(MINIMAL, "rounds.grace_s=1") == digest(MINIMAL, "rounds.grace_s=1.0")
    changed = ["run.id=other", "run.seed=1", "outer.lr=0.8", "sync.buffers=first", "sync.offsets_steps=[499]"]
    assert len({digest(MINIMAL), *(digest(MINIMAL, change) for change in changed)}) == len(changed) + 1
    assert re.fullmatch("[0-9a-f]{64}", digest(MINIMAL))


def test_the_checks_hold_for_settings_made_in_code_too() -> None:
    with pytest.raises(ValueError, match="unexpected"):
        RunConfig(run={"id": "r"}, unexpected=1)  # type: ignore[arg-type, call-arg]


SPREAD = ["sync.strategy=strided", "sync.fragments=4", "run.coordinators=['a:1', 'b:1']"]


def test_islands_agree_on_how_many_coordinators_there_are_and_not_on_where() -> None:
    def digest(*overrides: str) -> str:
        return load_run(MINIMAL, "run.toml", [*SPREAD, *overrides]).value.digest

    two = digest()
    assert digest("run.coordinator_index=1") == two
    assert digest("run.coordinators=['c:1', 'd:1']") == two
    assert digest("run.coordinators=['a:1', 'b:1', 'c:1']") != two
    assert digest("run.coordinators=['a:1']") == digest("run.coordinators=[]") != two


@pytest.mark.parametrize("address", ["a", "a:", ":1", "a b:1", "http://a:1", "a:1234567"])
def test_an_address_of_a_coordinator_is_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match=r"'run\.coordinators\.0'"):
        load_run(MINIMAL, "run.toml", [f"run.coordinators=['{address}']"])
