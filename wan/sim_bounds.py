"""What must stay bounded in every simulated run: files, memory, budgets, and the time until an answer."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.store import UPDATES_KEPT
from coordinator.upload import Slot
from diloco.config import RunConfig
from diloco.errors import DilocoError
from wan.sim_coordinator import SimCoordinator
from wan.sim_disk import Disk
from wan.sim_service import slot_of
from wan.sim_wire import IDLE_S, Reply, Request

ANSWER_S = 8.0
"""How long a request may take beyond what it asks to wait for and what its line is silent for: the disk, and turns."""
MANY_STREAMS = 16
"""A limit that no simulated run comes to."""
LOOK_S = 1.0
"""How often requests under way are looked through."""


class Bounds:
    """Watches what one run takes.

    Args:
        config: the run's settings.
        disk: the coordinator's.
        senders: most ranks of an island that own a part of a fragment.
        violate: is told of a violation, by the invariant's name and in words.
    """

    def __init__(self, config: RunConfig, disk: Disk, senders: int, violate: Callable[[str, str], None]) -> None:
        self.config, self.disk, self.senders, self.violate = config, disk, senders, violate
        self._tight = config.limits.streams < MANY_STREAMS
        self.skipped = 0
        """Rounds that were skipped or aborted."""
        self._stored: dict[Slot, tuple[str, int]] = {}
        """Of pushes under way: the digest of the payload, and the bytes that have come."""
        self._looked, self._looked_at, self._ticks, self._failing_until = -1, 0.0, 0, 0.0

    # -- streams ----------------------------------------------------------------------------------------------------

    def crashed(self) -> None:
        """What is not synced may be lost."""
        self._stored.clear()
        self._ticks = 0

    def stored(self, request: Request, have: int) -> None:
        """So many bytes of a push have come, from the first."""
        slot = slot_of(request)
        digest, before = self._stored.get(slot, ("", 0))
        if digest == request.digest and have < before:
            self.violate("I11", f"{before} bytes of {slot} had come, and now {have}")
        self._stored[slot] = request.digest, have

    def kept(self, slot: Slot) -> None:
        """All of it has come, and is in the ledger: a stream that comes after all the same is compared to its end."""
        self._stored.pop(slot, None)

    def answered(self, request: Request, reply: Reply) -> None:
        """A reply is on its way."""
        if request.method == "push" or reply.settled:
            self._stored.pop(slot_of(request), None)

    def resumed(self, request: Request, have: int) -> None:
        """A push is told to go on at byte `have`."""
        slot = slot_of(request)
        digest, stored = self._stored.get(slot, ("", 0))
        if digest == request.digest and have < stored:
            self.violate("I11", f"{stored} bytes of {slot} had come, and are to come again from {have}")

    def refused(self, request: Request, error: DilocoError) -> None:
        """A refusal is on its way; a payload that is whole, or that the disk did not take, is forgotten."""
        if request.method == "push":
            slot = slot_of(request)
            _, have = self._stored.get(slot, ("", 0))
            if have == request.total_bytes or "cannot be stored" in error.message:
                self._stored.pop(slot, None)

    # -- after every event --------------------------------------------------------------------------------------------

    def each(self, coordinator: SimCoordinator, now: float) -> None:
        """Looks at what may have changed."""
        if self.disk.failing:
            self._failing_until = now
        if self._tight and coordinator.admission.streams > self.config.limits.streams:
            self.violate("I6", f"{coordinator.admission.streams} streams are under way")
        if coordinator.ticks != self._ticks:
            self._ticks = coordinator.ticks
            self._tidy(coordinator)
        if self._looked != self.disk.changes:
            self._looked = self.disk.changes
            self._files(coordinator)
        if now >= self._looked_at + LOOK_S:
            self._looked_at = now
            self._waits(coordinator, now)

    def _tidy(self, coordinator: SimCoordinator) -> None:
        """A tick has passed: nothing is kept that is over."""
        for upload in coordinator.uploads.over(coordinator.intake.over):
            if upload.stream is None:
                self.violate("I6", f"{upload.slot} is kept, and can count no more")
        left = self.disk.partials.keys() - {upload.slot.name for upload in coordinator.uploads.uploads.values()}
        if left:
            self.violate("I6", f"uploads are left behind: {sorted(left)}")
        for fragment in range(len(coordinator.outers)):
            versions = coordinator.anchors.versions(fragment)
            if len(versions) > 2:
                self.violate("I6", f"versions {versions} of the anchor of fragment {fragment} are kept")

    def _files(self, coordinator: SimCoordinator) -> None:
        for slot in [s for s in self._stored if s not in coordinator.uploads.uploads and coordinator.intake.over(s)]:
            del self._stored[slot]
        snapshot, fragments = self.config.snapshot, len(coordinator.fragments)
        late = self.config.rounds.late_window
        kept = (snapshot.keep + 1) * snapshot.every_rounds + (2 + late) * fragments + self.skipped
        files = [name for name in self.disk.files if name.startswith("f")]
        if len(files) > kept * self.senders * len(coordinator.state.members):
            self.violate("I6", f"{len(files)} files of contributions are kept")
        if len(coordinator.outcomes) > fragments * UPDATES_KEPT:
            self.violate("I6", f"{len(coordinator.outcomes)} outcomes are in memory")
        limit, uploads = self.config.limits.disk_bytes, coordinator.uploads.uploads.values()
        coming = sum(u.reserved for u in uploads if not (u.stream and u.stream.storing))
        taken = sum(self.disk.files[name].numel() for name in files) + coming
        if limit and taken > limit:
            self.violate("I6", f"contributions take {taken} bytes, and limits.disk_bytes is {limit}")

    def _waits(self, coordinator: SimCoordinator, now: float) -> None:
        for process, served in list(coordinator.served.items()):
            request = served.request
            if process.done:
                del coordinator.served[process]
                continue
            bound = request.wait_s + ANSWER_S + (IDLE_S if request.method == "push" else 0.0)
            if now > max(served.moved_at, self._failing_until) + bound:
                served.moved_at = float("inf")
                self.violate("I11", f"{request.method} of {request.island} has no answer for {bound:g} s")
