"""File systems on which a ledger is not dependable are known by their mounts, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator import filesystem
from diloco.errors import EnvironmentFault

MOUNTS = r"""
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
22 21 0:21 / /proc rw,relatime - proc proc rw
30 21 0:40 / /mnt/share rw,relatime shared:1 - nfs4 server:/export rw,vers=4.2
31 30 0:41 / /mnt/share/local rw - xfs /dev/sdb rw
32 21 0:42 / /mnt/with\040space rw master:2 shared:7 - cifs //server/share rw
33 21 0:43 / /home/me rw - fuse.sshfs me@host: rw
34 21 0:44 / /scratch rw - lustre 10.0.0.1@tcp:/fs rw
35 21 0:45 / /twice rw - nfs server:/a rw
36 21 0:46 / /twice rw - tmpfs tmpfs rw
37 21 0:47 / /containers rw - overlay overlay rw,lowerdir=/a - b
a torn line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/var/state", "ext4"),
        ("/mnt/share", "nfs4"),
        ("/mnt/share/run/state", "nfs4"),
        ("/mnt/shared", "ext4"),
        ("/mnt/share/local/state", "xfs"),
        ("/mnt/with space/state", "cifs"),
        ("/home/me/state", "fuse.sshfs"),
        ("/scratch/state", "lustre"),
        ("/twice/state", "tmpfs"),
        ("/containers/state", "overlay"),
    ],
)
def test_the_deepest_and_latest_mount_counts(path: str, kind: str) -> None:
    assert filesystem.parse(MOUNTS, path) == kind


def test_no_mounts_are_no_file_system() -> None:
    assert filesystem.parse("", "/state") == ""


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "glusterfs", "ceph", "9p", "afs"]
)
def test_a_network_file_system_is_refused_unless_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"21 1 254:0 / / rw - ext4 /dev/vda rw\n22 21 0:1 / {tmp_path}/net rw - {kind} there rw\n")
    monkeypatch.setattr(filesystem, "MOUNTS", mounts)
    filesystem.check(tmp_path / "state", allowed=False)
    with pytest.raises(EnvironmentFault, match=rf"network file system \({kind}\).*--network-filesystem"):
        filesystem.check(tmp_path / "net" / "state", allowed=False)
    (tmp_path / "link").symlink_to(tmp_path / "net")
    with pytest.raises(EnvironmentFault, match="network file system"):
        filesystem.check(tmp_path / "link" / "state", allowed=False)
    assert not caplog.text
    filesystem.check(tmp_path / "net" / "state", allowed=True)
    assert "network file system" in caplog.text
    monkeypatch.setattr(filesystem, "MOUNTS", tmp_path / "none")
    filesystem.check(tmp_path / "net" / "state", allowed=False)
