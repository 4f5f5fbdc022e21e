"""Which file system a folder is on: a ledger is not dependable on one that is reached over a network."""

from __future__ import annotations

import logging
import re
from pathlib import Path, PurePosixPath

from diloco.errors import EnvironmentFault

log = logging.getLogger("diloco.coordinator")
MOUNTS = Path("/proc/self/mountinfo")
# fmt: off
NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fuse.beegfs", "fuse.ceph", "fuse.davfs2",
    "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.mount-s3", "fuse.rclone", "fuse.s3fs",
    "fuse.sshfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "orangefs", "panfs", "pvfs2", "smb3",
    "smbfs", "wekafs",
})
# fmt: on
"""Types in mountinfo whose locks or fsync another machine keeps, or nobody."""


def parse(mountinfo: str, path: str) -> str:
    """The type of the file system that an absolute path is on, or would be; "" where no mount point fits.

    Args:
        mountinfo: text in the format of /proc/self/mountinfo (man 5 proc).
        path: without symbolic links.
    """
    kind, deepest = "", -1
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, types = left.split(" "), right.split(" ")
        if len(fields) < 6 or not types[0]:
            continue
        point = PurePosixPath(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        depth = len(point.parts)
        if depth >= deepest and PurePosixPath(path).is_relative_to(point):  # a later mount hides an earlier one
            kind, deepest = types[0], depth
    return kind


def check(folder: Path, *, allowed: bool) -> None:
    """Looks at the file system of a state folder.

    Args:
        folder: need not exist yet.
        allowed: whether a network file system is taken all the same, with a warning.

    Raises:
        EnvironmentFault: it is a network file system.
    """
    if not MOUNTS.is_file():
        return
    kind = parse(MOUNTS.read_text(encoding="utf-8", errors="surrogateescape"), str(folder.resolve()))
    if kind not in NETWORK:
        return
    why = f"the state folder {folder} is on a network file system ({kind}), where locks and fsync are not dependable"
    if not allowed:
        raise EnvironmentFault(
            f"{why}: a ledger there can be lost or torn. Name a --state on a local disk, with snapshot.url for copies "
            "elsewhere; --network-filesystem takes the risk"
        )
    log.warning("%s: a power loss or a second coordinator can cost acknowledged contributions", why)
