"""The island's settings: what is local, checked as strictly as what is shared."""

from __future__ import annotations

import pytest

from diloco.config import load_run
from diloco.errors import ConfigError
from diloco.settings import to_toml
from diloco.tls import TLS
from island.config import check_code, load_island
from tests.diloco.test_config import fixes

RUN = '[run]\nid = "r"\n'
MINIMAL = '[island]\nid = "alpha"\n'


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        (["mesh.ranks=4", "mesh.replicas=3"], ["mesh.ranks", "mesh.replicas"]),
        (["mesh.ranks=6", "mesh.replicas=4", "data.batch_sequences=6"], ["mesh.ranks", "mesh.replicas"]),
        (["data.shard=2", "data.shards=2"], ["data.shard", "data.shards"]),
        (["mesh.ranks=3"], ["data.batch_sequences", "mesh.ranks"]),
        (["mesh.ranks=32"], ["data.batch_sequences", "mesh.ranks"]),
        *(
            (["mesh.ranks=4", f"mesh.{name}=2", "data.mask_documents=true"], ["data.mask_documents", f"mesh.{name}"])
            for name in ("tensor", "pipeline", "context")
        ),
        (["memory.attention=flash", "data.mask_documents=true"], ["data.mask_documents", "memory.attention"]),
    ],
)
def test_a_broken_rule_names_its_settings_and_every_fix_it_offers_is_accepted(
    overrides: list[str], fields: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_island(MINIMAL, "island.toml", overrides)
    message = str(caught.value)
    assert all(field in message.rpartition(": set ")[0] for field in fields)
    assert fixes(message)
    for fix in fixes(message):
        load_island(MINIMAL, "island.toml", [*overrides, fix])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("island.id=''", "'island.id': string should match pattern"),
        ("island.runid=x", "unknown key 'island.runid'; did you mean 'run_id'?"),
        ("mesh.device=tpu", "'mesh.device': input should be 'auto', 'cpu' or 'cuda', not 'tpu'"),
        ("mesh.ranks=0", "'mesh.ranks': input should be greater than or equal to 1, not 0"),
        ("data.held_out=0.5", "'data.held_out': input should be less than 0.5, not 0.5"),
        ("data.text=corpus.txt", "'data.text': input should be a valid tuple, not 'corpus.txt'"),
        ("metrics.queue_records=1.5", "'metrics.queue_records': input should be a valid integer"),
        ("sync.every_steps=3", "unknown key 'sync'; known keys: island, tls, mesh, memory, data, eval, metrics"),
    ],
)
def test_a_wrong_value_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_island(MINIMAL, "island.toml", [override])
    assert message in str(caught.value)


@pytest.mark.parametrize("given", [["cert"], ["cert", "key"], ["server_name"]])
def test_tls_files_go_together(given: list[str]) -> None:
    overrides = [f"tls.{name}={name}" for name in given]
    with pytest.raises(ConfigError) as caught:
        load_island(MINIMAL, "island.toml", overrides)
    missing = [f"tls.{name}" for name in ("cert", "key", "ca") if name not in given]
    assert str(caught.value).endswith(f"name a file for {' and '.join(missing)} too")


def test_tls_is_off_without_files_and_on_with_them() -> None:
    assert load_island(MINIMAL, "island.toml").value.tls.files() is None
    files = ["tls.cert=c.pem", "tls.key=k.pem", "tls.ca=a.pem"]
    assert load_island(MINIMAL, "island.toml", files).value.tls.files() == TLS(cert="c.pem", key="k.pem", ca="a.pem")


def test_an_island_needs_nothing_but_an_id() -> None:
    with pytest.raises(ConfigError, match=r"^'island\.id' is required"):
        load_island("", "island.toml")
    assert load_island(MINIMAL, "island.toml").value.island.id == "alpha"


def test_values_know_where_they_come_from() -> None:
    resolved = load_island(f"{MINIMAL}[mesh]\nranks = 2\n", "island.toml", ["data.text=['a', 'b']"])
    rows = {key: (value, origin) for key, value, origin in resolved.rows()}
    assert rows["mesh.ranks"] == (2, "island.toml")
    assert rows["data.text"] == (["a", "b"], "--set")
    assert rows["mesh.replicas"] == (1, "default")


def test_settings_survive_their_own_toml() -> None:
    config = load_island(MINIMAL, "island.toml", ["data.text=['a b', 'ü']", "mesh.ranks=2"]).value
    assert load_island(to_toml(config), "text").value == config


@pytest.mark.parametrize("setting", ["inner.optimizer=torch.optim:NAdam", "model.source=os:system"])
def test_code_of_a_run_is_run_only_where_the_island_allows_it(setting: str) -> None:
    key, _, name = setting.partition("=")
    run = load_run(RUN, "the test", [setting]).value
    with pytest.raises(ConfigError, match=f"{name}.*{key}") as caught:
        check_code(run, ("my_models:*",))
    [fix] = fixes(caught.value.message)
    check_code(run, load_island(MINIMAL, "the test", [fix]).value.island.code)
    check_code(run, (f"{name.partition(':')[0]}:*",))
    check_code(load_run(RUN, "the test").value, ())
