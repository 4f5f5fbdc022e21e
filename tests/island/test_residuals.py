"""What the up codec dropped, on disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.feedback import Fate, Kept
from island.residuals import Residuals

NUMELS = [5, 0, 3]


def values(seed: int) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {piece: torch.randn(numel, generator=generator) for piece, numel in enumerate(NUMELS)}


def kept(round_: int, residuals: dict[int, Tensor], left: dict[int, Tensor] | None = None) -> Kept:
    return Kept(round=round_, residuals=residuals, left=left or {}, fate=Fate.CARRIED)


def write(folder: Path, *newest: Kept) -> None:
    """What a process leaves that has kept these, one after the other."""
    for one in newest:
        residuals = Residuals([folder / "f0"])
        residuals.load(0, NUMELS)
        residuals.put(0, one)
        residuals.close()


def found(folder: Path) -> Kept | None:
    residuals = Residuals([folder / "f0"])
    residuals.close()
    return residuals.load(0, NUMELS)


def test_a_process_finds_what_the_last_one_kept(tmp_path: Path) -> None:
    write(tmp_path, kept(2, values(0)), kept(3, values(1), values(2)))
    again = found(tmp_path)
    assert again is not None
    assert (again.round, again.fate) == (3, Fate.CARRIED)
    for mine, theirs in ((values(1), again.residuals), (values(2), again.left)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[piece], theirs[piece]) for piece in mine)


def test_what_is_on_disk_already_is_not_written_again(tmp_path: Path) -> None:
    before, left = values(0), values(1)
    residuals = Residuals([tmp_path / "f0"])
    for one in (kept(1, before), kept(2, before, left), kept(2, left)):
        residuals.put(0, one)
        assert residuals.settle(20)
    residuals.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["f0.3.safetensors", "f0.4.safetensors", "f0.json"]
    assert json.loads((tmp_path / "f0.json").read_text())["residuals"][0] == "f0.3.safetensors"


def test_nothing_kept_is_nothing_found(tmp_path: Path) -> None:
    assert found(tmp_path / "nowhere") is None


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: flip(next(folder.glob("*.safetensors"))),
        lambda folder: next(folder.glob("*.safetensors")).write_bytes(b"x"),
        lambda folder: next(folder.glob("*.safetensors")).unlink(),
        lambda folder: (folder / "f0.json").write_text("{"),
        lambda folder: (folder / "f0.json").write_text("[]"),
        lambda folder: (folder / "f0.json").write_text(
            (folder / "f0.json").read_text().replace('"CARRIED"', '"PERHAPS"')
        ),
    ],
)
def test_damage_counts_as_nothing_and_is_told(
    harm: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, kept(2, values(0)))
    harm(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path) is None
    assert "f0 is passed over, and the residuals of fragment 0 begin with none" in caplog.text
    write(tmp_path, kept(3, values(1)))
    again = found(tmp_path)
    assert again is not None
    assert again.round == 3


def test_values_of_other_pieces_count_as_nothing(tmp_path: Path) -> None:
    residuals = Residuals([tmp_path / "f0"])
    residuals.put(0, kept(1, values(0)))
    residuals.close()
    assert Residuals([tmp_path / "f0"]).load(0, [5, 0, 4]) is None
    assert Residuals([tmp_path / "f0"]).load(0, [5]) is None


def test_files_of_which_nothing_speaks_go(tmp_path: Path) -> None:
    write(tmp_path, kept(2, values(0)))
    (tmp_path / "f0.77.safetensors").write_bytes(b"of a process that was killed")
    assert found(tmp_path) is not None
    assert not (tmp_path / "f0.77.safetensors").exists()


def test_a_disk_that_fails_is_told_of_once_and_used_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "spool"
    folder.write_text("no folder")
    residuals = Residuals([folder / "f0"])
    with caplog.at_level(logging.WARNING):
        for round_ in (1, 2):
            residuals.put(0, kept(round_, values(0)))
            assert residuals.settle(20)
    assert caplog.text.count("will not outlive this process") == 1
    folder.unlink()
    residuals.put(0, kept(3, values(0)))
    residuals.close()
    again = found(folder)
    assert again is not None
    assert again.round == 3
