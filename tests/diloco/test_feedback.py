"""Error feedback: nothing that an island has moved is lost or sent twice, whatever becomes of its contributions."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.codec import CODECS, Codec
from diloco.codec.topk import TopK
from diloco.errors import DivergedError
from diloco.feedback import Counted, Ending, Fate, Feedback, Kept, agreed, settled
from tests.diloco.test_replica import anchors, coded, model, replica

PROPERTY = settings(derandomize=True, deadline=None, max_examples=100)
SPARSE = TopK("sparse", 0, keep=2, value_bits=2, chunk=32)
LOSSY: list[Codec] = [CODECS["int4"], CODECS["int2"], CODECS["e3m0"], SPARSE]
NUMEL = 300

EARLIER, MOVED, LEFT = torch.tensor([1.0]), torch.tensor([10.0]), torch.tensor([4.0])


@pytest.mark.parametrize(
    ("fate", "ending", "kept"),
    [
        (Fate.COUNTS, Ending.COMMITTED, 4.0),
        (Fate.CARRIED, Ending.COMMITTED, 4.0),
        (Fate.DROPPED, Ending.COMMITTED, 1.0 + 0.75 * 10),
        (Fate.UNKNOWN, Ending.COMMITTED, 1.0 + 0.75 * 10),
        (Fate.COUNTS, Ending.NOT_COMMITTED, 1.0),
        (Fate.CARRIED, Ending.NOT_COMMITTED, 4.0 - 10.0),
        (Fate.DROPPED, Ending.NOT_COMMITTED, 1.0),
        (Fate.UNKNOWN, Ending.NOT_COMMITTED, 1.0),
        (Fate.COUNTS, Ending.PASSED_OVER, 4.0),
        (Fate.CARRIED, Ending.PASSED_OVER, 4.0),
        (Fate.DROPPED, Ending.PASSED_OVER, 1.0),
        (Fate.UNKNOWN, Ending.PASSED_OVER, 1.0),
    ],
)
def test_every_cell_of_the_table(fate: Fate, ending: Ending, kept: float) -> None:
    assert settled(EARLIER, MOVED, LEFT, fate, ending, 0.25).item() == kept
    assert (EARLIER.item(), MOVED.item(), LEFT.item()) == (1.0, 10.0, 4.0)


@dataclass
class Books:
    """An island of one piece, and where the mass of its pseudo-gradients is."""

    codec: Codec
    alpha: float
    chance: torch.Generator
    feedback: Feedback = field(default_factory=lambda: Feedback(1.0))
    anchor: Tensor = field(default_factory=lambda: torch.zeros(NUMEL))
    local: Tensor = field(default_factory=lambda: torch.zeros(NUMEL))
    moved: Tensor = field(default_factory=lambda: torch.zeros(NUMEL, dtype=torch.float64))
    """All pseudo-gradients, each movement once."""
    applied: Tensor = field(default_factory=lambda: torch.zeros(NUMEL, dtype=torch.float64))
    given_up: Tensor = field(default_factory=lambda: torch.zeros(NUMEL, dtype=torch.float64))
    again: Tensor = field(default_factory=lambda: torch.zeros(NUMEL))
    """What the next pseudo-gradient has of the last."""

    def noise(self) -> Tensor:
        return torch.randn(NUMEL, generator=self.chance)

    def round(self, fate: Fate, ending: Ending) -> None:
        """Trains, contributes, and takes what comes of it."""
        self.local -= 0.1 * self.noise()
        gradient = self.anchor - self.local
        self.moved += gradient - self.again
        payload = torch.empty(self.codec.size(NUMEL), dtype=torch.uint8)
        self.feedback.begin(0)
        list(self.feedback.encode(0, gradient, self.codec, payload))
        self.feedback.receipt(fate)
        counts = fate in (Fate.COUNTS, Fate.CARRIED)
        # A contribution that counts is applied where its round is committed, or a later one that it is carried into.
        if counts and (fate is Fate.CARRIED or ending is not Ending.NOT_COMMITTED):
            self.applied += self.codec.unpack(payload, (NUMEL,))
        self.feedback.end(ending, self.alpha)
        match ending:
            case Ending.COMMITTED:
                self.anchor = self.anchor - 0.1 * self.noise()
                self.local = (1 - self.alpha) * self.anchor + self.alpha * self.local
                self.again = torch.zeros(NUMEL) if counts else self.alpha * gradient
            case Ending.NOT_COMMITTED:
                self.again = gradient
            case Ending.PASSED_OVER:
                self.given_up += torch.zeros(NUMEL) if counts else gradient - 0
                self.anchor = self.anchor - 0.1 * self.noise()
                self.local, self.again = self.anchor.clone(), torch.zeros(NUMEL)

    def imbalance(self) -> float:
        """Largest difference between what was moved, and what was applied, is kept, or is still in the parameters."""
        waiting = self.again if self.waiting else torch.zeros(NUMEL)
        found = self.applied + self.feedback.residual(0, NUMEL) + waiting + self.given_up
        return float((found - self.moved).abs().max())

    @property
    def waiting(self) -> bool:
        return bool(self.again.any())


@given(
    rounds=st.lists(st.tuples(st.sampled_from(Fate), st.sampled_from(Ending)), max_size=12),
    alpha=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    codec=st.sampled_from(LOSSY),
    seed=st.integers(0, 2**31),
)
@PROPERTY
def test_what_was_applied_and_what_is_kept_is_what_was_moved(
    rounds: list[tuple[Fate, Ending]], alpha: float, codec: Codec, seed: int
) -> None:
    """Over any mix of accepted, refused, late and null rounds, to rounding (field note: garbage in null rounds)."""
    books = Books(codec=codec, alpha=alpha, chance=torch.Generator().manual_seed(seed))
    for fate, ending in rounds:
        books.round(fate, ending)
        assert books.imbalance() < 1e-4
    books.round(Fate.COUNTS, Ending.COMMITTED)
    assert not books.waiting
    assert books.imbalance() < 1e-4


@pytest.mark.parametrize("codec", LOSSY, ids=lambda c: c.name)
def test_residuals_stay_bounded(codec: Codec) -> None:
    books = Books(codec=codec, alpha=0.0, chance=torch.Generator().manual_seed(1))
    sizes = []
    for _ in range(120):
        books.round(Fate.COUNTS, Ending.COMMITTED)
        sizes.append(float(books.feedback.residual(0, NUMEL).norm()))
    assert max(sizes[60:]) < 1.5 * max(sizes[:60])


def test_what_is_kept_decays() -> None:
    feedback, codec = Feedback(0.5), TopK("one", 0, keep=1, value_bits=32, chunk=4)
    payload = torch.empty(codec.size(4), dtype=torch.uint8)
    for moved, sent in (([1.0, 4.0, 2.0, 3.0], [0.0, 4, 0, 0]), ([0.0, 0.0, 0.0, 0.0], [0.0, 0, 0, 1.5])):
        feedback.begin(0)
        list(feedback.encode(0, torch.tensor(moved), codec, payload))
        assert codec.unpack(payload, (4,)).tolist() == sent
        feedback.receipt(Fate.COUNTS)
        feedback.end(Ending.COMMITTED, 0.0)
    assert feedback.residual(0, 4).tolist() == [0.5, 0, 1.0, 0]


def test_a_contribution_that_was_never_settled_leaves_the_residual() -> None:
    books = Books(codec=CODECS["int2"], alpha=0.0, chance=torch.Generator().manual_seed(2))
    books.round(Fate.COUNTS, Ending.COMMITTED)
    before = books.feedback.residual(0, NUMEL).clone()
    list(
        books.feedback.encode(
            0, torch.ones(NUMEL), books.codec, torch.empty(books.codec.size(NUMEL), dtype=torch.uint8)
        )
    )
    books.feedback.receipt(Fate.COUNTS)
    books.feedback.begin(0)
    books.feedback.end(Ending.COMMITTED, 0.0)
    assert torch.equal(books.feedback.residual(0, NUMEL), before)


# -- through a replica -------------------------------------------------------------------------------------------------


def test_codecs_that_drop_little_keep_nothing() -> None:
    for up in ("fp32", "bf16", "fp16", "int8"):
        mine = replica(model(), up=up)
        assert mine.feedback is None
        mine.receipt(0, Fate.COUNTS)
        mine.end(0, Ending.COMMITTED)
        mine.rejoin({0: Counted(0, 1, frozenset())})
        mine.forget()


def test_what_a_replica_drops_goes_out_with_the_next_contribution() -> None:
    values = model()
    mine = replica(values, up="topk")
    for value in values.values():
        value.sub_(torch.linspace(1, 2, value.numel()).view(value.shape))
    moved = [h.anchor - h.local for h in mine.owned(0)]
    sent = [torch.zeros_like(m) for m in moved]
    for _ in range(2):
        payloads = list(mine.encode(0, mine.stage(0)))
        mine.receipt(0, Fate.COUNTS)
        mine.end(0, Ending.COMMITTED)
        mine.mix(0)
        for total, payload in zip(sent, payloads, strict=True):
            total += mine.up.unpack(payload, total.shape)
    assert mine.feedback is not None
    assert all(s.count_nonzero() == 2 for s in sent)
    for i, (s, m) in enumerate(zip(sent, moved, strict=True)):
        assert torch.allclose(s + mine.feedback[0].residual(i, m.numel()).view(m.shape), m)
    assert mine.feedback[1].residual(0, 4).tolist() == [0.0] * 4


def test_joining_again_keeps_and_forgetting_drops() -> None:
    values = model()
    mine = replica(values, up="topk")
    assert mine.feedback is not None
    values["embed"].sub_(torch.linspace(1, 2, 15).view(5, 3))
    for fate, kept in ((Fate.UNKNOWN, 0), (Fate.COUNTS, 14)):
        list(mine.encode(0, mine.stage(0), 3))
        mine.receipt(0, fate)
        mine.rejoin({0: Counted(4, 20, frozenset())})  # so long ago that only this rank knows
        assert mine.feedback[0].residual(0, 15).count_nonzero() == kept
    mine.forget()
    assert mine.feedback[0].residual(0, 15).count_nonzero() == 0


def test_a_pseudo_gradient_that_is_not_finite_never_enters_a_residual() -> None:
    values = model()
    mine = replica(values, up="int2")
    values["embed"][0, 0] = torch.nan
    with pytest.raises(DivergedError, match="embed"):
        list(mine.encode(0, mine.stage(0)))
    mine.end(0, Ending.COMMITTED)
    assert mine.feedback is not None
    assert mine.feedback[0].residual(0, 15).tolist() == [0.0] * 15


def test_a_damaged_update_moves_no_anchor() -> None:
    mine = replica(model(), down="int8")
    before = anchors(mine)
    update = torch.cat([coded(torch.ones(h.box.numel), "int8") for h in mine.held(0)])
    update[-25] = 0xFF  # upper half of the last tensor's scale: NaN
    with pytest.raises(Exception, match="int8: the payload is damaged"):
        mine.decode(mine.held(0), update)
    assert all(torch.equal(a, b) for a, b in zip(before, anchors(mine), strict=True))


# -- joining again, and what a process finds ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heard", "counted", "kept"),
    [
        (Fate.UNKNOWN, Counted(0, 7, frozenset({7})), 4.0),  # the receipt was lost
        (Fate.COUNTS, Counted(0, 7, frozenset({2})), 1.0),  # another rank's part never came
        (Fate.COUNTS, Counted(0, 9, frozenset({7})), 4.0),
        (Fate.DROPPED, Counted(5, 9, frozenset({7})), 4.0),  # it came late, and counts after all
        (Fate.UNKNOWN, Counted(8, 30, frozenset()), 1.0),  # nobody knows any more
        (Fate.COUNTS, Counted(8, 30, frozenset()), 4.0),
        (Fate.COUNTS, Counted(0, 9, frozenset({7, 8})), 0.0),  # a later contribution has been sent meanwhile
        (Fate.COUNTS, Counted(0, 6, frozenset()), 0.0),  # of another past of the run
    ],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_what_the_coordinator_knows_settles_what_was_in_flight(
    heard: Fate, counted: Counted, kept: float, restarted: bool
) -> None:
    feedback = Feedback(1.0)
    feedback.restore(Kept(round=7, residuals={0: EARLIER}, left={0: LEFT}, fate=heard))
    if restarted:
        fresh = Feedback(1.0)
        fresh.restore(feedback.keep())
        feedback = fresh
    feedback.rejoin(counted)
    assert feedback.residual(0, 1).item() == kept
    assert feedback.keep() == Kept(
        round=7, residuals={0: feedback.residual(0, 1)} if kept else {}, left={}, fate=Fate.UNKNOWN
    )


def test_what_is_settled_is_kept_unless_it_is_old() -> None:
    for counted, kept in ((Counted(0, 9, frozenset({3, 7})), 1.0), (Counted(0, 9, frozenset({8})), 0.0)):
        feedback = Feedback(1.0)
        feedback.restore(Kept(round=7, residuals={0: EARLIER}, left={}, fate=Fate.UNKNOWN))
        feedback.rejoin(counted)
        assert feedback.residual(0, 1).item() == kept


@pytest.mark.parametrize(
    ("fates", "together"),
    [
        ([], Fate.COUNTS),
        ([Fate.COUNTS, Fate.COUNTS], Fate.COUNTS),
        ([Fate.COUNTS, Fate.CARRIED], Fate.CARRIED),
        ([Fate.COUNTS, Fate.DROPPED, Fate.CARRIED], Fate.DROPPED),
        ([Fate.UNKNOWN, Fate.COUNTS], Fate.UNKNOWN),
        ([Fate.DROPPED, Fate.UNKNOWN], Fate.DROPPED),
    ],
)
def test_ranks_settle_alike(fates: list[Fate], together: Fate) -> None:
    assert agreed(fates) is together
    assert agreed(reversed(fates)) is together
