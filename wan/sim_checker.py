"""What must hold in every simulated run, checked from outside: from durable rows, replies and reported digests.

I1  an acknowledged contribution is folded exactly once, or recorded as dropped or skipped with a reason
I2  versions grow by one, and no island sees one go back within an epoch
I3  everybody who reports a version of a fragment holds the same digest, across crashes
I4  every round ends by its hard deadline, the coordinator's downtime and its disk's excluded; while the run is paused
    none ends by the clock
I5  replaying all rows that ever became durable reproduces all digests and the state, and so does the compacted ledger
I6  files, uploads under way, pinned anchors and outcomes in memory stay bounded, no file is left behind, and streams
    and bytes stay within `[limits]`
I7  a refused request changes nothing
I8  nothing counts that came under an epoch that was over
I9  once nothing disturbs it any more, the run ends
I10 the updates of a fragment's last rounds stay to be fetched, across crashes
I11 a request is answered within a bound, and what has come of a push need not come again
I12 nobody hears of what is not durable
I13 all ranks settle what a codec drops of a contribution alike: as counting where it counts, and only there
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import xxhash

from coordinator import recovery
from coordinator.facts import Committed, Entry
from coordinator.fold import Outer, fold
from coordinator.inbox import Inbox
from coordinator.ledger import Row
from coordinator.results import Outcome
from coordinator.store import UPDATES_KEPT
from coordinator.upload import Slot
from diloco.codec.policy import down_choice
from diloco.config import RunConfig
from diloco.digest import show
from diloco.errors import DilocoError, Expired
from diloco.feedback import Fate
from diloco.fragments import Fragment
from diloco.merge import shares
from diloco.schedule import Schedule
from wan.sim_bounds import Bounds
from wan.sim_coordinator import ROOT, TICK_S, SimCoordinator
from wan.sim_disk import Disk, MemoryStored
from wan.sim_wire import Reply, Request

SLACK_S = 1.5
"""What ending a round may take beyond its deadline and a tick: the disk, and requests that were first."""


@dataclass(frozen=True, kw_only=True)
class Violation:
    """Something that must never be."""

    invariant: str
    words: str
    at: float
    """Virtual seconds since the run began."""


@dataclass(frozen=True)
class Key:
    """One island's contribution to a round, under an epoch."""

    island: str
    epoch: int
    fragment: int
    round: int


class Checker:
    """Watches one run.

    Args:
        config, fragments: the run.
        disk: the coordinator's.
        senders: ranks of each island that own a part of each fragment.
    """

    def __init__(
        self,
        config: RunConfig,
        fragments: tuple[Fragment, ...],
        disk: Disk,
        senders: dict[str, list[int]],
    ) -> None:
        self.config, self.fragments, self.disk, self.senders = config, fragments, disk, senders
        self.now = 0.0
        self.violations: list[Violation] = []
        self.outers: list[Outer] = []
        self.digests: dict[tuple[int, int], int] = {}
        self._genesis: list[Outer] = []
        self._epochs: dict[str, int] = {}
        self._parts: dict[Key, dict[int, dict[str, Any]]] = defaultdict(dict)
        self._entries: dict[tuple[int, int], dict[str, Entry]] = defaultdict(dict)
        self._carried: dict[tuple[int, int], dict[str, dict[str, Any]]] = defaultdict(dict)
        """By fragment and the round that contributions are folded into: the rows of those that came late."""
        self._dropped: set[tuple[int, int, str]] = set()
        self._ends: dict[tuple[int, int], dict[str, float] | None] = {}
        self._position = [(0, 0)] * len(Schedule.of(config).offsets)
        self._since: dict[int, float] = {}
        self._acked: dict[Key, set[int]] = defaultdict(set)
        self._books: dict[Key, bool] = {}
        """Contributions that islands have settled, and whether as counting."""
        self._seen: dict[tuple[str, int, int], int] = {}
        self._history: list[tuple[str, dict[str, Any]]] = []
        """All rows in the order they became durable: the ledger itself is compacted."""
        self._paused = False
        self._failing_until = 0.0
        self.bounds = Bounds(config, disk, max(max(counts) for counts in senders.values()), self.violate)

    def violate(self, invariant: str, words: str) -> None:
        """Records a violation."""
        self.violations.append(Violation(invariant=invariant, words=words, at=self.now))

    # -- the ledger -------------------------------------------------------------------------------------------------

    def row(self, kind: str, body: dict[str, Any]) -> None:
        """A row has become durable."""
        self._history.append((kind, body))
        match kind:
            case "paused":
                self._paused = True
            case "admitted":
                self._epochs[body["island"]] = body["epoch"]
            case "gone":
                self._epochs[body["island"]] = 0
            case "planted":
                self.outers = [outer.copy() for outer in self._genesis]
                self.digests = {(f, 0): outer.digest for f, outer in enumerate(self.outers)}
            case "resumed":
                self._paused = False
                self._since = dict.fromkeys(self._since, self.now)
            case "part":
                self._part(body)
            case "accepted":
                self._accepted(body["fragment"], body["round"], Entry(**body["entry"]))
            case "carried":
                self._late(body)
            case "dropped":
                self._dropped.add((body["fragment"], body["round"], body["island"]))
                if body["spoiled"]:
                    self._since.setdefault(body["fragment"], self.now)
            case "committed":
                self._by_the_clock(body)
                self._ended(body["fragment"], body["round"], body["version"], body["shares"])
            case "skipped" | "aborted":
                self.bounds.skipped += 1
                self._by_the_clock(body)
                self._ended(body["fragment"], body["round"], None, None)
            case "folded":
                self._folded(body)

    def _by_the_clock(self, body: dict[str, Any]) -> None:
        if self._paused and " within " in body["reason"]:
            self.violate("I4", f"fragment {body['fragment']} ends a round in a paused run: {body['reason']}")

    def _part(self, body: dict[str, Any]) -> None:
        key = Key(body["island"], body["epoch"], body["fragment"], body["round"])
        if self._epochs.get(key.island) != key.epoch:
            self.violate("I8", f"a part of {key} is taken, and the island's epoch is {self._epochs.get(key.island)}")
        if body["rank"] in self._parts[key]:
            self.violate("I1", f"rank {body['rank']}'s part of {key} is recorded twice")
        if xxhash.xxh3_128_hexdigest(self.disk.archive[body["file"]].numpy().data) != body["digest"]:
            self.violate("I1", f"rank {body['rank']}'s part of {key} is recorded, and its file has other bytes")
        self._parts[key][body["rank"]] = body
        self.bounds.kept(Slot(key.fragment, key.round, key.island, body["rank"], seed=False))

    def _accepted(self, fragment: int, round_: int, entry: Entry) -> None:
        self._since.setdefault(fragment, self.now)
        entries = self._entries[fragment, round_]
        if entry.island in entries:
            self.violate("I1", f"{entry.island} is accepted twice in round {round_} of fragment {fragment}")
        if self._position[fragment][1] != round_:
            self.violate("I1", f"{entry.island} is accepted in round {round_} of fragment {fragment}, which is over")
        if self._epochs.get(entry.island) != entry.epoch:
            self.violate("I8", f"{entry.island} is accepted under epoch {entry.epoch}, which is over")
        entries[entry.island] = entry

    def _late(self, body: dict[str, Any]) -> None:
        fragment, round_, entry = body["fragment"], body["round"], Entry(**body["entry"])
        name = f"{entry.island}@{round_}"
        twice = any(name in rows for (number, _), rows in self._carried.items() if number == fragment)
        if twice or entry.island in self._entries[fragment, round_]:
            self.violate("I1", f"{entry.island} counts twice for round {round_} of fragment {fragment}")
        if self._position[fragment][1] != body["into"] or round_ >= body["into"]:
            self.violate("I1", f"{name} is carried into round {body['into']} of fragment {fragment}, which is not open")
        if self._epochs.get(entry.island) != entry.epoch:
            self.violate("I8", f"{name} is carried under epoch {entry.epoch}, which is over")
        self._carried[fragment, body["into"]][name] = body

    def _weights(self, fragment: int, round_: int) -> dict[str, float]:
        """What each contribution that is recorded for a round weighs, found without the coordinator's state."""
        period, policy = self.config.sync.every_steps - self.config.sync.overlap_steps, self.config.merge.weights
        rows = [(i, entry, 1.0) for i, entry in self._entries[fragment, round_].items()]
        rows += [(n, Entry(**row["entry"]), row["factor"]) for n, row in self._carried[fragment, round_].items()]
        return {
            name: factor * (entry.tokens if policy == "tokens" else min(entry.steps, period) or period)
            for name, entry, factor in rows
        }

    def _ended(self, fragment: int, round_: int, version: int | None, given: dict[str, float] | None) -> None:
        self._since.pop(fragment, None)
        before, expected = self._position[fragment]
        if round_ != expected:
            self.violate("I2", f"fragment {fragment}: round {round_} ends, and round {expected} was open")
        if version is not None and version != before + 1:
            self.violate("I2", f"fragment {fragment}: version {version} is committed after version {before}")
        if given is not None:
            right = shares(self._weights(fragment, round_))
            if list(right.items()) != list(given.items()):
                self.violate("I1", f"fragment {fragment} round {round_} folds {given}, and {right} arrived")
        self._ends[fragment, round_] = given
        self._position[fragment] = (before if version is None else version, round_ + 1)

    def _folded(self, body: dict[str, Any]) -> None:
        fragment, round_, version = body["fragment"], body["round"], body["version"]
        outer = self.outers[fragment]
        if version == outer.version + 1:
            given = self._ends.get((fragment, round_)) or {}
            keys = {i: Key(i, entry.epoch, fragment, round_) for i, entry in self._entries[fragment, round_].items()}
            for name, row in self._carried[fragment, round_].items():
                keys[name] = Key(row["entry"]["island"], row["entry"]["epoch"], fragment, row["round"])
            parts = {
                name: [self._archived(b).part() for b in self._parts[keys[name]].values()]
                for name in given
                if name in keys
            }
            down = down_choice(self.config.wire)
            outer, _ = fold(self.fragments[fragment], outer, parts, given, self.config.outer, down)
            self.outers[fragment] = outer
            self._same_digest(fragment, version, outer.digest, "a replay of the ledger", "I5")
        if show(self.digests.get((fragment, version), 0)) != body["digest"]:
            self.violate("I5", f"fragment {fragment} version {version} is recorded with a digest that no replay gives")

    def _archived(self, body: dict[str, Any]) -> MemoryStored:
        archive = Disk()
        archive.files = self.disk.archive
        return MemoryStored(
            pieces=recovery.pieces_of(body),
            codecs=recovery.codecs_of(body),
            path=archive.file(body["file"]).path,
            digest=body["digest"],
            disk=archive,
        )

    # -- what others see --------------------------------------------------------------------------------------------

    def _same_digest(self, fragment: int, version: int, digest: int, who: str, invariant: str = "I3") -> None:
        known = self.digests.setdefault((fragment, version), digest)
        if known != digest:
            words = f"fragment {fragment} version {version} has digest {show(digest)} at {who}, and {show(known)}"
            self.violate(invariant, f"{words} elsewhere")

    def reported(self, island: str, epoch: int, fragment: int, version: int, digest: int) -> None:
        """An island holds a version."""
        if version < self._seen.get((island, epoch, fragment), 0):
            self.violate("I2", f"{island} sees fragment {fragment} go back to version {version}")
        self._seen[island, epoch, fragment] = version
        self._same_digest(fragment, version, digest, island)

    def based(self, island: str, fragment: int, version: int, digest: int) -> None:
        """An island contributes from a version."""
        self._same_digest(fragment, version, digest, f"{island}, which contributes from it")

    def settled(self, key: Key, rank: int, fate: Fate) -> None:
        """A rank takes what the codec dropped of a contribution for all that is left of it, or does not."""
        counts = fate in (Fate.COUNTS, Fate.CARRIED)
        if counts and rank not in self._acked[key]:
            self.violate("I13", f"rank {rank} settles its part of {key}, of which it has no receipt")
        if counts and not self._taken(key):
            self.violate("I13", f"rank {rank} settles its part of {key} as counting, and it does not")
        if self._books.setdefault(key, counts) != counts:
            self.violate("I13", f"the ranks of {key.island} do not settle {key} alike")

    def _taken(self, key: Key) -> dict[tuple[int, int], str]:
        """The rounds in which a contribution counts, and its name there."""
        on_time, late = self._entries[key.fragment, key.round].get(key.island), f"{key.island}@{key.round}"
        found = {(key.fragment, key.round): key.island} if on_time and on_time.epoch == key.epoch else {}
        rows = {at: names[late] for at, names in self._carried.items() if at[0] == key.fragment and late in names}
        return found | {at: late for at, row in rows.items() if row["entry"]["epoch"] == key.epoch}

    def mismatched(self, island: str, fragment: int, version: int) -> None:
        """What an island has fetched, every chunk with its checksum, is not what the coordinator named."""
        self.violate("I3", f"{island} has fetched fragment {fragment} version {version} with other bits")

    def crashed(self) -> None:
        """The coordinator is killed: of what is not synced anything may be lost."""
        self.bounds.crashed()

    def stored(self, request: Request, have: int) -> None:
        """So many bytes of a push have come, from the first."""
        self.bounds.stored(request, have)

    def resumed(self, request: Request, have: int) -> None:
        """A push is told to go on at byte `have`."""
        self.bounds.resumed(request, have)

    def planted(self, outers: list[Outer]) -> None:
        """The coordinator has written first parameters; they count once the ledger says so."""
        self._genesis = [outer.copy() for outer in outers]

    def published(self, fragment: int, round_: int, outcome: Outcome) -> None:
        """The coordinator has published how a round ended."""
        if (fragment, round_) not in self._ends:
            self.violate("I12", f"islands hear how round {round_} of fragment {fragment} ended before the ledger does")
        self._same_digest(fragment, outcome.version, outcome.digest, "the coordinator")

    def answered(self, request: Request, reply: Reply) -> None:
        """The coordinator has sent a reply."""
        self.bounds.answered(request, reply)
        for fragment, counted in enumerate(reply.contributed):  # to a join: as good as receipts that were lost
            for key in [k for k in self._parts if (k.island, k.fragment) == (request.island, fragment)]:
                if key.round in counted.rounds and self._taken(key):
                    self._acked[key].update(self._parts[key])
        push = request.method == "push" or reply.settled
        if push and not request.seed and not reply.dropped:
            key = Key(request.island, request.epoch, request.fragment, request.round)
            if request.rank not in self._parts[key]:
                self.violate("I12", f"rank {request.rank}'s part of {key} has a receipt and is not in the ledger")
            self._acked[Key(request.island, request.epoch, request.fragment, request.round)].add(request.rank)

    def refused(self, request: Request, error: DilocoError, changes: int) -> None:
        """The coordinator has refused a request."""
        self.bounds.refused(request, error)
        if request.method == "update" and isinstance(error, Expired):
            last = self._position[request.fragment][1]
            if request.round >= last - UPDATES_KEPT:
                self.violate("I10", f"{request.island} asks for round {request.round}, {last} is open: {error}")
        if changes:
            self.violate("I7", f"{request.method} of {request.island} is refused ({error}) and made {changes} changes")

    # -- checks -----------------------------------------------------------------------------------------------------

    def restarted(self, coordinator: SimCoordinator) -> None:
        """A coordinator has taken up the disk: what was acknowledged is there."""
        self._since = dict.fromkeys(self._since, self.now)
        if coordinator.state.seeded:
            self._leads_on(coordinator.found)
        found = [(current.version, current.round) for current in coordinator.state.rounds]
        if found != self._position:
            self.violate("I5", f"the coordinator takes up rounds {found}, and the ledger says {self._position}")
        for key, ranks in self._acked.items():
            current = coordinator.state.rounds[key.fragment]
            member = coordinator.state.members.get(key.island)
            held = member is not None and member.present and member.epoch == key.epoch
            if current.round != key.round or not held or key.island in current.refused:
                continue
            chart = coordinator.fragments[key.fragment]
            inbound = coordinator.inbox.inbound(chart, key.round, key.island, key.epoch, accepted=True)
            missing = ranks - set(inbound.parts if inbound else ())
            if inbound and missing:
                self.violate("I1", f"a restart lost the acknowledged parts of ranks {sorted(missing)} of {key}")
            if inbound and any(s.path.name not in self.disk.files for s in inbound.parts.values()):
                self.violate("I1", f"a restart lost files of {key}")

    def each(self, coordinator: SimCoordinator | None) -> None:
        """After every event."""
        if coordinator is None:
            return
        if self.disk.failing:
            self._failing_until = self.now
        deadline_s, slack_s = self.config.rounds.deadline_s, TICK_S + SLACK_S
        for fragment, since in self._since.items():
            if self.now > max(since + deadline_s, self._failing_until) + slack_s and not coordinator.state.paused:
                self.violate("I4", f"the round of fragment {fragment} is open for {self.now - since:.1f} s")
                self._since[fragment] = float("inf")
        self.bounds.each(coordinator, self.now)

    def end(self, coordinator: SimCoordinator | None, finished: bool, why: str) -> None:
        """At the end of the run."""
        if not finished or coordinator is None:
            self.violate("I9", f"the run has not ended: {why}")
            return
        for key, ranks in self._acked.items():
            if len(ranks) == self.senders[key.island][key.fragment] and not self._settled(key):
                self.violate("I1", f"{key} was acknowledged and is neither folded nor recorded as dropped")
        for key, counts in self._books.items():
            if not counts and any(name in (self._ends.get(at) or {}) for at, name in self._taken(key).items()):
                self.violate("I13", f"{key} is settled as not counting, and was folded")
        oldest, late = self.disk.snapshots[0].rounds, self.config.rounds.late_rounds
        for name in sorted(coordinator.disk.files):
            if name.startswith("f") and not coordinator.inbox.holds(coordinator.disk.file(name).path):
                fragment, round_ = (int(part[1:]) for part in name.split("-")[:2])
                if round_ < oldest[fragment] - late:
                    self.violate("I6", f"file {name} is left behind")
        whole = [Row(seq=seq, at=0.0, kind=kind, body=body) for seq, (kind, body) in enumerate(self._history, 1)]
        try:
            found, compacted = self._replay(whole), self._replay(self.disk.rows())
        except DilocoError as error:
            self.violate("I5", f"the ledger cannot be replayed: {error}")
            return
        if found.state != compacted.state:
            self.violate("I5", "the compacted ledger comes to another state than all rows")
        for at, how in compacted.ends.items():
            if found.ends[at] != how:
                self.violate("I5", f"fragment and round {at} ended {how} by the compacted ledger, and {found.ends[at]}")
        if not compacted.digests.items() <= found.digests.items():
            self.violate("I5", "the compacted ledger has other digests than all rows")
        self._leads_on(compacted)
        for (fragment, version), digest in found.digests.items():
            if digest != show(self.digests[fragment, version]):
                self.violate("I5", f"the ledger's digest of fragment {fragment} version {version} is another")
        live = coordinator.state
        if (found.state.phase, found.state.last_epoch) != (live.phase, live.last_epoch) or [
            (r.version, r.round) for r in found.state.rounds
        ] != [(r.version, r.round) for r in live.rounds]:
            self.violate("I5", "a replay of the ledger comes to another state than the coordinator's")

    def _leads_on(self, found: recovery.Recovered) -> None:
        """The ledger leads on from the oldest snapshot: all that was folded since is there to be folded again."""
        oldest = self.disk.snapshots[0].rounds
        for (fragment, round_), (end, _) in found.ends.items():
            if isinstance(end, Committed) and round_ >= oldest[fragment]:
                names = {name for name in end.shares if self._lacks(found.inbox, fragment, round_, name)}
                if names:
                    self.violate("I5", f"contributions of {names} to round {round_} of {fragment} are needed, and gone")

    def _lacks(self, inbox: Inbox, fragment: int, round_: int, name: str) -> bool:
        try:
            parts = inbox.parts(fragment, round_, name)
        except KeyError:
            return True
        return sum(piece.box.numel for part in parts for piece in part.pieces) != self.fragments[fragment].numel

    def _replay(self, rows: Iterable[Row]) -> recovery.Recovered:
        return recovery.replay((row for row in rows if row.kind != "run"), self.config, ROOT, self._archived)

    def _settled(self, key: Key) -> bool:
        where = {(key.fragment, key.round): key.island}
        where |= {
            at: f"{key.island}@{key.round}" for at in self._carried if f"{key.island}@{key.round}" in self._carried[at]
        }
        ends = [(self._ends.get(at, {}), name) for at, name in where.items()]
        dropped = (key.fragment, key.round, key.island) in self._dropped
        return dropped or any(end is None or name in end for end, name in ends)
