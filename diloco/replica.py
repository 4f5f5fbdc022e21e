"""The island's half of the algorithm, as one rank sees it: anchors of its own pieces, and what a sync does to them.

    stage -> encode -> (the coordinator) -> decode -> mix

Tensors and plain values in, tensors and plain values out; threads, sockets and process groups belong to the caller.
Anchors are fp32 on the CPU (pinned where there is CUDA), so a device holds no more than the one tensor being mixed; or
beside the parameters on their device, where a pseudo-gradient is then taken. What an update makes of them is worked out
on the CPU in either case, so that the bits are the same (`diloco/arriving.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from diloco.arriving import Arriving, Home, Homes, split, views
from diloco.buffers import Buffers
from diloco.codec import Choice, native
from diloco.crossing import Crossing
from diloco.digest import combine, digest
from diloco.errors import DivergedError, LayoutError
from diloco.feedback import AT_ONCE, Counted, Ending, Fate, Feedback
from diloco.fragments import Fragment
from diloco.layout import Box, Piece, TensorSpec


@dataclass(kw_only=True, eq=False)
class Held:
    """One piece that this rank holds, and its anchor."""

    piece: Piece
    spec: TensorSpec
    start: int
    """Flat offset of the piece's tensor in its fragment."""
    local: Tensor
    """The training parameters of the piece, fp32, on the training device; shares storage with the model."""
    owners: tuple[int, ...]
    """Ranks of the island that hold this piece; the first sends, receives and counts for it."""
    on_device: bool = False
    """Whether the anchor is on the device of `local`, rather than on the CPU. The same for all pieces of a rank."""
    anchor: Tensor = field(init=False)
    """The outer parameters of the piece, fp32, contiguous. Never shares storage with `local`."""
    moves: int = field(default=0, init=False)
    """Changes whenever the anchor begins to change, and when that is over."""
    _home: Home | None = field(default=None, init=False)
    _known: tuple[int, int] = field(default=(0, -1), init=False)
    """A part of the digest, and `moves` when it was found."""

    def __post_init__(self) -> None:
        if self.local.dtype != torch.float32:
            raise LayoutError(
                f"tensor '{self.spec.name}' is {self.local.dtype}: small inner steps would vanish. Keep float32 "
                "parameters and compute in bfloat16 (FSDP: MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
            )
        device = self.local.device if self.on_device else torch.device("cpu")
        pinned = self.local.is_cuda and not self.on_device
        self.anchor = torch.empty(self.local.shape, dtype=torch.float32, device=device, pin_memory=pinned)
        self.anchor.copy_(self.local)

    @property
    def box(self) -> Box:
        return self.piece.box

    def digest(self) -> int:
        """This piece's part of its fragment's digest."""
        return digest(self.anchor, self.start, self.spec.shape, self.box)

    @property
    def known(self) -> int | None:
        """The same as it was found when the anchor last moved, if it is known and still true."""
        return self._known[0] if self._known[1] == self.moves else None

    def settle(self, home: Home | None, anchor: Tensor, known: int | None) -> Home | None:
        """Takes another tensor for the anchor, or the same with other values; returns the home of the one before. See
        `arriving.Homes`."""
        left, self._home, self.anchor = self._home, home, anchor
        self.moves += 1
        self._known = (0, -1) if known is None else (known, self.moves)
        return left


@dataclass(kw_only=True, eq=False)
class Staged:
    """Local parameters of a fragment's owned pieces, on their way to the CPU; or already what is to be encoded."""

    copies: list[Tensor]
    """fp32, CPU (pinned with CUDA), one per owned piece: views of `buffer`."""
    buffer: Tensor
    finite: bool
    """Whether all local parameters are."""
    copied: torch.cuda.Event | None = None
    """With CUDA, what says that the copies are complete."""
    moved: bool = False
    """Whether they are the pseudo-gradient already: it was taken on the device, or kept."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a fragment stands on this island: the version of its anchor, and the round that ends next."""

    version: int
    round: int


class Replica:
    """One rank's anchors and what a sync does with them.

    Args:
        rank: this rank in its island.
        fragments: the run's fragments, the static one (if any) last.
        held: the pieces of this rank, in any order.
        up, down: codecs of contributions and of updates.
        alpha: share of the local parameters kept when an update is applied.
        feedback_decay: factor on what `up` dropped of the last contribution when it is added to the next, for codecs
            where that is worth it.
    """

    def __init__(
        self,
        *,
        rank: int,
        fragments: Sequence[Fragment],
        held: Iterable[Held],
        up: Choice,
        down: Choice,
        alpha: float,
        feedback_decay: float = 1.0,
    ) -> None:
        self.rank, self.fragments, self.up, self.down, self.alpha = rank, fragments, up, down, alpha
        pieces = sorted(held, key=lambda h: (h.piece.tensor, h.box.offset))
        self._held = [[h for h in pieces if h.piece.tensor in f.place] for f in fragments]
        self.position = [Position(0, 0) for _ in fragments]
        self.feedback = [Feedback(feedback_decay) for _ in fragments] if up.feedback and feedback_decay else None
        """Per fragment, what codecs dropped of this rank's contributions; None where all drop little."""
        self.on_device = any(h.on_device for h in pieces)
        """Whether anchors are on the device of the parameters."""
        device = next((h.local.device for h in pieces if h.local.is_cuda), torch.device("cpu"))
        self._crossing = Crossing(device)
        self._buffers = Buffers(torch.float32, pinned=self._crossing.pinned)
        """For staged parameters: at most two idle ones of the size of the largest fragment."""
        self._homes = Homes(self._crossing)
        for fragment in range(len(fragments) if not self.on_device else 0):
            self._house(self.owned(fragment))
        self._crossing.wait()  # anchors on a device are there
        self._staged: dict[int, Tensor] = {}
        """Of fragments whose contribution is in flight, what holds the pseudo-gradient."""
        self.taken: list[int | None] = [None] * len(fragments)
        """Rounds whose outcome this rank's owned anchors hold: ahead of `position` while an update is on its way into
        training. None where the anchors are no version of the run's."""

    def held(self, fragment: int) -> list[Held]:
        """All pieces of a fragment on this rank, in the order of tensors and offsets."""
        return self._held[fragment]

    def owned(self, fragment: int) -> list[Held]:
        """The pieces this rank sends and receives for its island."""
        return [h for h in self._held[fragment] if h.owners[0] == self.rank]

    def _house(self, owned: Sequence[Held]) -> None:
        """Puts the anchors of a fragment next to each other."""
        home = self._homes.take(sum(h.box.numel for h in owned))
        for h, view in zip(owned, views(home.buffer, owned), strict=True):
            self._homes.move(h, home, view.copy_(h.anchor), None)

    # -- up ---------------------------------------------------------------------------------------------------

    def stage(self, fragment: int) -> Staged:
        """Copies the owned pieces' local parameters to the CPU, and looks at them on the way: the one thing that holds
        the training thread. With anchors on the device it is their difference that is copied.

        On CUDA it waits only for whether they are finite: the copies run on a stream of their own, between what the
        training stream has done and what it will do.
        """
        owned = self.owned(fragment)
        buffer = self._buffers.take(sum(h.box.numel for h in owned))
        copies = views(buffer, owned)
        if not any(h.local.is_cuda for h in owned):
            good = [_stage(held, copy) for copy, held in zip(copies, owned, strict=True)]
            return Staged(copies=copies, buffer=buffer, finite=all(good), moved=self.on_device)
        training, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(training)
        with torch.cuda.stream(side):
            for copy, held in zip(copies, owned, strict=True):
                copy.copy_(held.anchor - held.local if held.on_device else held.local, non_blocking=True)
        bounds = [torch.stack(torch.aminmax(h.local.detach())) for h in owned if h.local.numel()]
        finite = not bounds or bool(torch.stack(bounds).isfinite().all())  # NaN is both: one pass, and no mask
        training.wait_stream(side)
        return Staged(copies=copies, buffer=buffer, finite=finite, copied=side.record_event(), moved=self.on_device)

    def unstage(self, staged: Staged) -> None:
        """Takes back what is not to be sent."""
        if staged.copied:
            staged.copied.synchronize()
        self._buffers.give(staged.buffer)

    def restage(self, fragment: int) -> Staged:
        """What is to be filled with a pseudo-gradient that was kept, to be encoded again."""
        owned = self.owned(fragment)
        buffer = self._buffers.take(sum(h.box.numel for h in owned))
        return Staged(copies=views(buffer, owned), buffer=buffer, finite=True, moved=True)

    def pseudo_gradient(self, fragment: int, staged: Staged) -> list[Tensor]:
        """The pseudo-gradient of what is staged (fp32, by owned piece), as `encode` takes it; changes nothing."""
        if staged.copied:
            staged.copied.synchronize()
        if staged.moved:
            return [copy.clone() for copy in staged.copies]
        return [h.anchor - copy for h, copy in zip(self.owned(fragment), staged.copies, strict=True)]

    def contribution_size(self, fragment: int) -> int:
        """Bytes that this rank sends for one contribution."""
        return sum(self.up.of(h.spec).size(h.box.numel) for h in self.owned(fragment))

    def encode(self, fragment: int, staged: Staged, round_: int = 0, payload: Tensor | None = None) -> Iterator[Tensor]:
        """Turns staged parameters into the payload of a contribution; yields it bit by bit, as it is made.

        The pseudo-gradient is anchor minus local, in fp32: a descent direction (DiLoCo, algorithm 1). It is taken in
        the staged copies, unless it was before. They are used up; with error feedback they are kept until the round has
        ended.

        Args:
            payload: where it is written, uint8 [contribution_size(fragment)]; a fresh buffer if there is none.

        Raises:
            DivergedError: a pseudo-gradient that is not finite.
        """
        if staged.copied:
            staged.copied.synchronize()
        feedback = self.feedback[fragment] if self.feedback else None
        if feedback:
            feedback.begin(round_)
            self._staged[fragment] = staged.buffer
        if payload is None:
            payload = torch.empty(self.contribution_size(fragment), dtype=torch.uint8)
        for number, (held, copy) in enumerate(zip(self.owned(fragment), staged.copies, strict=True)):
            codec, anchor, moved = self.up.of(held.spec), held.anchor.view(-1), copy.view(-1)
            part, payload = payload[: codec.size(moved.numel())], payload[codec.size(moved.numel()) :]
            if feedback and codec.feedback:
                _take(held, anchor, moved, staged)
                yield from feedback.encode(number, moved, codec, part)
                continue
            for values, bytes_ in codec.slices(moved.numel(), AT_ONCE):
                _take(held, anchor[values], moved[values], staged)
                codec.encode(moved[values], part[bytes_])
                yield part[bytes_]
        if not feedback:
            self._buffers.give(staged.buffer)

    def fate(self, fragment: int) -> Fate:
        """What this rank has heard of the contribution in flight; of none at all, that it counts."""
        return self.feedback[fragment].fate if self.feedback and self.owned(fragment) else Fate.COUNTS

    def receipt(self, fragment: int, fate: Fate) -> None:
        """Hears what the coordinator says of the contribution that was encoded last."""
        if self.feedback:
            self.feedback[fragment].receipt(fate)

    def end(self, fragment: int, ending: Ending) -> None:
        """Settles what the codec dropped of a contribution whose round has ended; nothing where there was none."""
        if self.feedback:
            self.feedback[fragment].end(ending, self.alpha)
            if fragment in self._staged:
                self._buffers.give(self._staged.pop(fragment))

    def rejoin(self, counted: Mapping[int, Counted]) -> None:
        """Settles what is in flight of some fragments, whose anchors and local parameters are taken anew.

        Args:
            counted: by fragment, what the coordinator knows of the island's contributions.
        """
        for fragment, known in counted.items():
            if self.feedback:
                self.feedback[fragment].rejoin(known)

    def forget(self) -> None:
        """Drops what the codec has dropped: it comes from training that is not finite."""
        for feedback in self.feedback or ():
            feedback.forget()

    # -- down -------------------------------------------------------------------------------------------------

    def update_size(self, held: Sequence[Held]) -> int:
        """Bytes of an update for some pieces."""
        return sum(self.down.of(h.spec).part_size(h.spec.shape, h.box) for h in held)

    def arriving(self, held: Sequence[Held]) -> Arriving:
        """Takes an update for some pieces of one fragment, as its bytes come."""
        return Arriving(held, self.down, self._homes)

    def decode(self, held: Sequence[Held], payload: Tensor) -> None:
        """Moves the anchors of some pieces by an update: `anchor <- anchor - decoded`, the same bits everywhere.

        Args:
            held: pieces of one fragment, in the order of the payload.
            payload: uint8 [update_size(held)].

        Raises:
            CodecError: the payload has another size, or is damaged; no anchor has moved.
        """
        self.arriving(held).apply(payload)

    def load(self, held: Sequence[Held], payload: Tensor, choice: Choice) -> None:
        """Replaces the anchors of some pieces by whole values, as when joining."""
        for h, part in zip(held, split(held, payload, choice), strict=True):
            h.moves += 1
            values = torch.empty_like(h.anchor, device="cpu") if h.on_device else h.anchor
            choice.of(h.spec).decode_part(part, h.spec.shape, h.box, values.view(-1))
            if h.on_device:
                self._crossing.up([values], [h.anchor])
            h.moves += 1

    def digest_parts(self, fragment: int, *, known: bool = False) -> tuple[int, int]:
        """This rank's parts of two sums over the island: the fragment's digest, and a check that must come to 0.

        Owners add their pieces to the first. To the second every other holder adds what it holds and the owner takes
        away as much as the others should hold; so it is 0 exactly where all copies inside the island agree.

        Args:
            known: take what was found while an update was applied, rather than look at those anchors again.
        """
        owned, check = 0, 0
        for h in self._held[fragment]:
            part = h.known if known and h.known is not None else h.digest()
            if h.owners[0] == self.rank:
                owned = combine(owned, part)
                check = combine(check, -part * (len(h.owners) - 1))
            else:
                check = combine(check, part)
        return owned, check

    @torch.no_grad()
    def mix(self, fragment: int, alpha: float | None = None) -> None:
        """Brings the anchor into training: `local <- (1 - alpha) * anchor + alpha * local`, tensor by tensor."""
        alpha = self.alpha if alpha is None else alpha
        for h in self._held[fragment]:
            if not alpha and native.usable(h.local, h.anchor):
                native.copy(h.anchor, h.local)
                increment_version(h.local)
            elif not alpha:
                h.local.copy_(h.anchor, non_blocking=True)
            else:
                h.local.mul_(alpha).add_(h.anchor.to(h.local.device, non_blocking=True), alpha=1 - alpha)
        if any(h.local.is_cuda for h in self._held[fragment]):
            torch.cuda.current_stream().synchronize()  # the anchors may move again from now on

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges anchors and local parameters in place, so that the model computes with the outer parameters.

        Call it again to undo it. Nothing may be in flight meanwhile.
        """
        pieces = list(chain.from_iterable(self._held))
        for h in pieces:
            h.moves += 1
            kept = h.local.to(h.anchor.device, copy=True)
            h.local.copy_(h.anchor)
            h.anchor.copy_(kept)
        self._crossing.wait()
        for h in pieces:
            h.moves += 1


@torch.no_grad()
def _stage(held: Held, out: Tensor) -> bool:
    """Stages a piece (fp32, CPU) in one pass; returns whether its local parameters are finite."""
    if held.on_device:
        torch.sub(held.anchor, held.local, out=out)
        return _finite(held.local)
    if native.usable(held.local, out):
        return native.copy(held.local, out)
    out.copy_(held.local)
    return _finite(out)


def _finite(values: Tensor) -> bool:
    return not values.numel() or all(map(math.isfinite, torch.aminmax(values)))


def _take(held: Held, anchor: Tensor, moved: Tensor, staged: Staged) -> None:
    """Puts the pseudo-gradient in place of staged values, unless it is there. Raises `DivergedError` where it is not
    finite."""
    if not staged.moved:
        torch.sub(anchor, moved, out=moved)
    if not _finite(moved):
        raise DivergedError(f"the pseudo-gradient of '{held.spec.name}' is not finite", tensor=held.spec.name)
