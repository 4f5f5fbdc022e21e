"""The soak: what it plans and how it judges; and, slowly, a short one."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from wan.soak import ISLANDS, compare, main
from wan.soak_judge import (
    DESCRIPTORS,
    GAP_S,
    JUDGED_S,
    RSS_BYTES,
    STATE_BYTES,
    Growth,
    Life,
    Sample,
    attacks,
    judged,
    longest_gap,
    verdict,
)

VICTIMS = ["coordinator", *ISLANDS]


def life(seconds: float, *, descriptors: float = 0.0, rss_bytes: float = 0.0, until: float = math.inf) -> Life:
    """A life that is sampled every 2 s, and grows by so much a second `until` it stops growing; a wave on top."""
    found = Life(name="coordinator", pid=7)
    for tick in range(int(seconds) // 2 + 1):
        at = 2.0 * tick
        grown = min(at, until)
        found.samples.append(
            Sample(
                at=at,
                descriptors=20 + round(descriptors * grown) + tick % 3,
                threads=9 + tick % 2,
                rss_bytes=10**8 + round(rss_bytes * grown),
            )
        )
    return found


def test_growth_is_what_the_line_through_the_second_half_rises_by() -> None:
    assert life(100, rss_bytes=1000).growth(lambda s: s.rss_bytes) == pytest.approx(50_000)
    assert life(100, rss_bytes=1000, until=50).growth(lambda s: s.rss_bytes) == pytest.approx(0, abs=1)
    assert life(2).growth(lambda s: s.rss_bytes) == 0.0


def test_short_lives_are_not_judged() -> None:
    growths = judged([life(JUDGED_S - 2), life(JUDGED_S), Life(name="never sampled", pid=1)])
    assert [growth.seconds for growth in growths] == [JUDGED_S]


def test_what_comes_and_goes_is_no_growth() -> None:
    assert not list(Growth.of(life(300)).faults())


@pytest.mark.parametrize(
    ("seconds", "figures", "words"),
    [
        (300, {"descriptors": 2 * DESCRIPTORS / 150}, "file descriptors"),
        (300, {"rss_bytes": 2 * RSS_BYTES / 150}, "MiB of resident memory"),
    ],
)
def test_a_leak_is_told(seconds: float, figures: dict[str, float], words: str) -> None:
    [fault] = verdict(judged([life(seconds, **figures)]), 1.0, 0)
    assert words in fault
    assert "coordinator (pid 7)" in fault


def test_gaps_and_a_large_folder_are_told() -> None:
    assert not verdict([], GAP_S, STATE_BYTES)
    assert len(verdict([], GAP_S + 1, STATE_BYTES + 1)) == 2


def test_the_longest_gap_may_be_the_last() -> None:
    assert longest_gap([3.0, 1.0, 7.0], 8.0) == 4.0
    assert longest_gap([1.0, 3.0], 20.0) == 17.0
    assert longest_gap([1.0, 3.0], 2.0) == 2.0
    assert longest_gap([], 20.0) == math.inf


def test_a_seed_plans_the_same_attacks_on_everybody() -> None:
    planned = attacks(5, 600.0, VICTIMS, 6.0, 8.0)
    assert planned == attacks(5, 600.0, VICTIMS, 6.0, 8.0)
    assert planned != attacks(6, 600.0, VICTIMS, 6.0, 8.0)
    assert 40 <= len(planned) <= 80
    assert all(early.at < late.at < 600.0 for early, late in pairwise(planned))
    counts = Counter(attack.victim for attack in planned)
    assert set(counts) == set(VICTIMS)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_anchors_of_islands_are_compared_at_their_versions(tmp_path: Path) -> None:
    for name, digest in zip(ISLANDS, ("aa", "aa", "ff"), strict=True):
        rows = [{"kind": "end", "versions": "1", "digests": "00"}, {"kind": "end", "versions": "3", "digests": digest}]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(compare(tmp_path, {(0, 3): "aa"})) == [
        "island-3: fragment 0 version 3 has ff; the coordinator folded aa"
    ]
    (tmp_path / "island-1.jsonl").unlink()
    assert "island-1 has left no digests" in list(compare(tmp_path, {(0, 3): "aa"}))


@pytest.mark.slow
def test_a_short_soak_is_well(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    ended = CliRunner().invoke(main, ["--minutes", "0.34", "--seed", "1", "--json", str(path)])
    assert ended.exit_code == 0, ended.output
    results = json.loads(path.read_text())
    assert f"{results['rounds']} rounds, ok" in ended.output.splitlines()[-1]
    assert results["kills"] + results["holds"] >= 1
    assert results["rounds"] >= 2
    assert results["faults"] == []
