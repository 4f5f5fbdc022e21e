"""Whether the run is the one that is meant, with its code, its model and a mesh that fits."""

from __future__ import annotations

import pytest

from diloco.errors import ConfigError, ExitCode
from diloco.framing import PROTOCOL
from diloco.settings import to_toml
from diloco.v1 import coordinator_pb2 as pb
from island.config import IslandConfig
from island.preflight import agreement
from tests.support import configure


def island(**sections: object) -> IslandConfig:
    return IslandConfig.model_validate({"island": {"id": "tokyo"}, **sections})


def reply(**fields: object) -> pb.StatusReply:
    state = pb.RunState(phase="running")
    given = {"run_id": "test", "state": state, "config_toml": to_toml(configure()), "protocol": PROTOCOL, **fields}
    return pb.StatusReply(**given)  # type: ignore[arg-type]


def test_the_run_is_the_one_that_is_meant() -> None:
    config, tokyo = configure(), island().island
    finding = agreement.run(reply(), config, tokyo, configure())
    assert finding.verdict == "ok" and finding.found.startswith("run 'test' is running")
    for bad, found in (
        (agreement.run(reply(protocol=PROTOCOL + 1), config, tokyo, None), f"protocol {PROTOCOL + 1}"),
        (
            agreement.run(reply(), config, island(island={"id": "a", "run_id": "b"}).island, None),
            "island.run_id is 'b'",
        ),
        (
            agreement.run(reply(), config, tokyo, configure("outer.lr=0.9")),
            "outer.lr is 0.9 here and 0.7 there",
        ),
    ):
        assert (bad.verdict, bad.code) == ("fail", ExitCode.REFUSED)
        assert found in bad.found
    many = configure(
        "outer.lr=0.9", *(f"inner.{key}=0.5" for key in ("lr", "eps", "momentum", "weight_decay", "clip_norm"))
    )
    assert "and 1 more" in agreement.run(reply(), config, tokyo, many).found


@pytest.mark.parametrize(
    ("state", "verdict"), [("ACTIVE", "warn"), ("SUSPECT", "warn"), ("LOST", "ok"), ("LEFT", "ok")]
)
def test_an_island_of_the_same_name_is_told(state: str, verdict: str) -> None:
    there = reply(islands=[pb.IslandStatus(id="tokyo", state=state)])
    assert agreement.run(there, configure(), island().island, None).verdict == verdict


def test_settings_of_a_later_version_are_not_guessed_at() -> None:
    assert agreement.served(reply()) == configure()
    with pytest.raises(ConfigError, match=r"does not know the run's settings .*outer\.mood.*coordinator's version"):
        agreement.served(reply(config_toml='[run]\nid = "x"\n[outer]\nmood = 1\n'))


def test_the_model_is_the_runs() -> None:
    config = configure()
    mine = agreement.model_layout(config)
    assert agreement.layout(mine, config, reply()).found.endswith("no island has joined before")
    assert agreement.layout(mine, config, reply(layout_digest=mine.digest)).verdict == "ok"
    assert agreement.layout(mine, config, None).verdict == "warn"
    finding = agreement.layout(mine, config, reply(layout_digest="ab" * 32, parameters=7))
    assert (finding.verdict, finding.code) == ("fail", ExitCode.REFUSED)
    assert "the run's has 7 values" in finding.found
    with pytest.raises(ConfigError):
        agreement.layout(mine, configure("sync.fragments=300", "sync.every_steps=300", "run.steps=3000"), reply())


def test_code_must_be_allowed() -> None:
    named = configure("model.source=m:f")
    assert agreement.code(configure(), island().island).found == "the run names none"
    with pytest.raises(ConfigError, match=r'island\.code=\["m:f"\]'):
        agreement.code(named, island().island)
    allowed = island(island={"id": "a", "code": ["m:*"]}).island
    assert agreement.code(named, allowed).found == "m:f: allowed by island.code"


def test_the_mesh_fits_with_every_number_of_nodes() -> None:
    assert agreement.mesh(island(), configure()).found == "one rank; a rank reads 16 sequences a step"
    both = island(mesh={"ranks": 8, "tensor": 2, "pipeline": 2})
    found = agreement.mesh(both, configure()).found
    assert found == "pipeline 2, shard 2, tensor 2; a rank reads 8 sequences a step"
    odd = agreement.mesh(both, configure("model.ffn_dim=101"))
    assert (odd.verdict, odd.code) == ("fail", ExitCode.USAGE) and "set it to 1" in odd.found
    nodes = {"least": 1, "most": 2, "rendezvous": "host:1"}
    bad = agreement.mesh(island(mesh={"ranks": 4, "context": 2}, nodes=nodes), configure("model.sequence_length=63"))
    assert bad.verdict == "fail" and bad.found.startswith("with 2 of 2 nodes, the mesh does not fit the model")
