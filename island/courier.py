"""Carries one rank's pieces to the coordinator and back, off the training thread."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from diloco.codec import CODECS
from diloco.config import RunConfig
from diloco.errors import DeadlineExceeded, Dismissed, Expired, Refused, StaleEpoch
from diloco.failpoints import failpoint
from diloco.feedback import Fate
from diloco.framing import piece_to_proto
from diloco.replica import Held, Replica, Staged
from diloco.v1 import coordinator_pb2 as pb
from island.link import Link
from island.parcel import Parcel
from island.spool import remove

log = logging.getLogger("diloco.island")
Key = tuple[int, int]
"""Fragment and round."""
WAIT_S = 20.0
"""How long one request may wait at the coordinator for a round to end; then it asks again."""


class Courier:
    """One rank's bulk traffic under one epoch.

    Args:
        link: the connection.
        replica: the rank's anchors.
        identity: run, island and epoch, for every request.
        config: the run's settings.
        spool_dir: where anchors are kept while they come, for a process that is started again; none to keep none.
        encoded: hears, off the training thread, that a fragment's contribution is encoded and about to be sent.
        fragments: those that the coordinator keeps; none for all.
        guard: held while anchors are read or moved, where the island's couriers share it.
    """

    def __init__(
        self,
        link: Link,
        replica: Replica,
        identity: pb.HeartbeatRequest,
        config: RunConfig,
        spool_dir: Path | None = None,
        encoded: Callable[[int], None] = lambda _: None,
        *,
        fragments: Sequence[int] | None = None,
        guard: threading.RLock | None = None,
    ) -> None:
        self._link, self._replica, self._config = link, replica, config
        self._identity, self._spool_dir, self._encoded = identity, spool_dir, encoded
        self.fragments = range(len(replica.fragments)) if fragments is None else fragments
        """Those that the coordinator keeps."""
        self.anchors = guard or threading.RLock()
        """Held while anchors are read or moved."""
        self.accepted = 0
        """Parts of contributions that counted."""
        self.held = False
        """Whether the run stands still on purpose, so that rounds may take as long as they like."""
        self.counted: Mapping[Key, Fate] = {}
        """What an earlier process of the island has contributed: it is made again, and not sent."""
        self.repeats = False
        """Whether the island repeats what an earlier process has done, and has yet to contribute something new."""
        self._abandoned = False
        self._encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encoder")
        self._pushed: set[int] = set()
        """Fragments of which this courier has sent a contribution."""

    def abandon(self) -> None:
        """The epoch is over: what is in flight moves no anchor any more."""
        with self.anchors:
            self._abandoned = True

    def seed(self, fragment: int) -> None:
        """Sends the first parameters of the owned pieces (fp32)."""
        owned, codec = self._replica.owned(fragment), CODECS["fp32"]
        if not owned:
            return
        header = self._header(fragment, owned, codec.id, codec.version)
        header.seed = True
        header.total_bytes = sum(codec.size(h.box.numel) for h in owned)
        self._link.push(
            header,
            lambda: (h.anchor.cpu().view(-1).view(torch.uint8) for h in owned),
            self._config.wire.chunk_bytes,
        )

    def exchange(
        self,
        fragment: int,
        round_: int,
        base_version: int,
        staged: Staged,
        tokens: int,
        steps: int,
        places: Sequence[str] = (),
    ) -> pb.FetchHeader:
        """Contributes to a round, waits for it to end, and moves the anchors of the owned pieces."""
        self.contribute(fragment, round_, base_version, staged, tokens, steps, places)
        return self.fetch_update(fragment, round_)

    def contribute(
        self,
        fragment: int,
        round_: int,
        base_version: int,
        staged: Staged,
        tokens: int,
        steps: int,
        places: Sequence[str] = (),
    ) -> None:
        """Sends this rank's part of a contribution.

        Args:
            staged: local parameters of the owned pieces, as `Replica.stage` gives them; used up.
            tokens: tokens the island trained since it adopted the fragment's anchor.
            steps: inner steps since then.
            places: where the island stood in its shards; the same on all ranks.

        Raises:
            DivergedError: a pseudo-gradient that is not finite. What was sent has no end, and counts for nothing.
        """
        owned, up = self._replica.owned(fragment), self._replica.up
        if (fragment, round_) in self.counted:
            self._count_again(fragment, round_, staged)
            return
        if not owned:
            return
        header = self._header(fragment, owned, up.id, up.version)
        header.round, header.base_version, header.tokens, header.steps = round_, base_version, tokens, steps
        header.places.extend(places)
        header.total_bytes = self._replica.contribution_size(fragment)
        first = fragment not in self._pushed  # an earlier process may have sent some of the same bytes
        self._pushed.add(fragment)
        parcel, payload = Parcel(), self._link.buffers.take(header.total_bytes)
        making = self._encoder.submit(parcel.make, lambda: self._encode(fragment, staged, round_, payload))
        try:
            receipt = self._link.push(header, parcel.read, self._config.wire.chunk_bytes, resumed=first)
        finally:
            wait([making])  # it has the anchors; and its error is the one that counts
        making.result()
        self._link.buffers.give(payload)
        failpoint("push-answered")
        if receipt.dropped:
            log.warning("contribution to fragment %d round %d: %s", fragment, round_, receipt.dropped)
        with self.anchors:
            self.accepted += not receipt.dropped
            if not self._abandoned:
                self._replica.receipt(fragment, _fate(receipt))
        if self.repeats and (receipt.dropped or receipt.late):
            raise StaleEpoch("the run has gone on without this island while it repeated its steps")
        self.repeats = False

    def _count_again(self, fragment: int, round_: int, staged: Staged) -> None:
        """Has the replica stand as after a contribution that is known to count."""
        with self.anchors:
            self._check()
            if self._replica.feedback:
                collections.deque(self._replica.encode(fragment, staged, round_), maxlen=0)
                self._replica.receipt(fragment, self.counted[fragment, round_])
            else:
                self._replica.unstage(staged)
            self.accepted += bool(self._replica.owned(fragment))
        self._encoded(fragment)

    def _encode(self, fragment: int, staged: Staged, round_: int, payload: Tensor) -> Iterator[Tensor]:
        """The payload of a contribution, as it is made; its end comes once all who are to hear of it have."""
        with self.anchors:
            self._check()
            yield from self._replica.encode(fragment, staged, round_, payload)
        self._encoded(fragment)
        failpoint("push-encoded")

    def sit_out(self, fragment: int, round_: int, reason: str) -> pb.FetchHeader:
        """Says, as rank 0, that the island contributes nothing to a round; then as `fetch_update`."""
        if self._replica.rank == 0:
            identity = self._identity
            request = pb.DeclineRequest(
                run_id=identity.run_id,
                island_id=identity.island_id,
                epoch=identity.epoch,
                fragment=fragment,
                round=round_,
                reason=reason,
            )
            try:
                self._link.decline(request)
            except (StaleEpoch, Dismissed):
                raise
            except Refused as error:  # the round has ended without this island, or will by its deadline
                log.warning("declining fragment %d round %d: %s", fragment, round_, error.message)
        return self.fetch_update(fragment, round_)

    def fetch_update(self, fragment: int, round_: int) -> pb.FetchHeader:
        """Waits for a round to end and moves the anchors of the owned pieces by its update, unless they have moved.

        Raises:
            DeadlineExceeded: the round has not ended although its deadline has passed. Only time that the coordinator
                has let pass counts: while nobody answers, or the run is held, no deadline runs.
        """
        failpoint("outcome-asked")
        taken = self._replica.taken[fragment]
        held = taken is not None and taken > round_
        owned = [] if held else self._replica.owned(fragment)
        request = self._request(fragment, owned)
        request.round = round_
        rounds = self._config.rounds
        bound = rounds.deadline_s + 2 * rounds.lease_s + WAIT_S
        waited, arriving = 0.0, self._replica.arriving(owned)
        while True:
            request.wait_s = WAIT_S
            header, payload = self._link.fetch(request, self._replica.update_size(owned), follow=arriving.take)
            if header.outcome != "open":
                break
            waited += 0.0 if self.held else WAIT_S
            if waited > bound:
                raise DeadlineExceeded(
                    f"round {round_} of fragment {fragment} has not ended within {bound:.0f} s: {header.reason}",
                    fragment=fragment,
                )
        with self.anchors:
            self._check()
            if header.outcome == "committed" and not held:
                arriving.apply(payload)
                failpoint("anchor-moved")
            self._replica.taken[fragment] = round_ + 1
        self._link.buffers.give(payload)
        return header

    def outcome(self, fragment: int, round_: int) -> bytes:
        """How a round ended, or that it is open. Raises `Expired` where that is no longer known."""
        request = self._request(fragment, [])
        request.round = round_
        return bytes(self._link.fetch(request, 0)[0].outcome.encode())

    def catch_up(self, fragment: int, round_: int) -> pb.FetchHeader | None:
        """Moves the anchors of the owned pieces by the updates of ended rounds, until `round_` is the next.

        Returns:
            The header of the last update, or None where there was none to fetch.

        Raises:
            Expired: an update is no longer kept, or the anchors are no version of the run's, or a later one.
        """
        taken, header = self._replica.taken[fragment], None
        if taken is None or taken > round_:
            raise Expired(f"the anchor of fragment {fragment} is not one of the run's last: fetch anchors")
        for missed in range(taken, round_):
            header = self.fetch_update(fragment, missed)
        return header

    def fetch_anchor(self, fragment: int) -> pb.FetchHeader:
        """Replaces the anchors of the owned pieces by the coordinator's, at whatever version that is."""
        owned, codec = self._replica.owned(fragment), CODECS["fp32"]
        request = self._request(fragment, owned)
        request.anchor = True
        spool = self._spool(request)
        header, payload = self._link.fetch(request, sum(codec.size(h.box.numel) for h in owned), spool)
        with self.anchors:
            self._check()
            self._replica.load(owned, payload, codec)
            self._replica.taken[fragment] = header.round
        if spool:
            remove(spool)
        return header

    def _spool(self, request: pb.FetchRequest) -> Path | None:
        """Where the anchors of these pieces are kept while they come."""
        if self._spool_dir is None:
            return None
        pieces = of_pieces(self._replica.owned(request.fragment))
        return self._spool_dir / f"{request.run_id}_{request.island_id}_f{request.fragment}_{pieces}"

    def _check(self) -> None:
        if self._abandoned:
            raise StaleEpoch(f"epoch {self._identity.epoch} of island '{self._identity.island_id}' is over")

    def _header(self, fragment: int, held: Sequence[Held], codec_id: int, codec_version: int) -> pb.PushHeader:
        return pb.PushHeader(
            run_id=self._identity.run_id,
            island_id=self._identity.island_id,
            epoch=self._identity.epoch,
            rank=self._replica.rank,
            fragment=fragment,
            codec_id=codec_id,
            codec_version=codec_version,
            pieces=[piece_to_proto(h.piece) for h in held],
        )

    def _request(self, fragment: int, held: Sequence[Held]) -> pb.FetchRequest:
        return pb.FetchRequest(
            run_id=self._identity.run_id,
            island_id=self._identity.island_id,
            epoch=self._identity.epoch,
            fragment=fragment,
            pieces=[piece_to_proto(h.piece) for h in held],
        )


def of_pieces(held: Sequence[Held]) -> str:
    """What tells files of some pieces from those of others."""
    return xxhash.xxh3_64_hexdigest(b"".join(piece_to_proto(h.piece).SerializeToString() for h in held))


def _fate(receipt: pb.Receipt) -> Fate:
    if receipt.dropped:
        return Fate.DROPPED
    return Fate.CARRIED if receipt.late else Fate.COUNTS
