"""A run as messages: for islands (`RunState`) and for operators (`StatusReply`)."""

from __future__ import annotations

import math
from statistics import fmean

from coordinator import rounds
from coordinator.run import Run
from coordinator.state import Member
from coordinator.words import phase_reason, waiting_for
from diloco.settings import to_toml
from diloco.v1 import coordinator_pb2 as pb

UINT64 = 2**64 - 1


def run_state(run: Run, island: str = "", *, newcomer: bool = False, serial: int = 0) -> pb.RunState:
    """How a run stands. To an `island` also what it is to do, where it takes up the run if it is a `newcomer`, and what
    it is to read, if that is other than under `serial`."""
    directive, why = rounds.directive(run.state, island) if island else ("", "")
    division = run.state.division
    now, awaited = division.serials.get(island, 0), division.awaited(run.config.shards, island)
    reason = f"waiting for {awaited} shards that other islands still read" if awaited else ""
    return pb.RunState(
        phase=run.state.phase,
        reason=phase_reason(run.state) or reason,
        fragments=[_fragment(run, fragment.index) for fragment in run.fragments if not fragment.elsewhere],
        seeder=run.state.seeder,
        step=run.step if newcomer else 0,
        directive=directive,
        directive_reason=why,
        paused=run.state.paused,
        serial=now,
        shards=division.told(island) if now != serial else [],
        shards_awaited=awaited,
    )


def _fragment(run: Run, fragment: int) -> pb.FragmentState:
    seeded = fragment < len(run.outers)
    view = pb.FragmentState(
        fragment=fragment,
        version=run.outers[fragment].version if seeded else 0,
        round=run.ended[fragment] if seeded else 0,
        digest=run.outers[fragment].digest & UINT64 if seeded else 0,
        seeded=seeded,
        soft_s=math.nan,
        hard_s=math.nan,
    )
    current = run.state.rounds[fragment] if fragment < len(run.state.rounds) else None
    if current is None or current.opened_at is None:
        return view
    now = run.clock()
    stood = run.state.paused_at if run.state.paused else now  # the clock of a paused run stands still
    soft = rounds.soft_deadline(run.state, fragment)
    view.waiting_for = waiting_for(run.state, fragment, now)
    view.contributed.extend(sorted(current.entries))
    view.missing.extend(rounds.missing_islands(run.state, fragment))
    view.open_s = now - current.opened_at
    view.hard_s = current.opened_at + run.state.config.deadline_s - stood
    view.soft_s = math.nan if soft is None else soft - stood
    return view


def contributed(run: Run, island: str) -> list[pb.Contributed]:
    """What became of an island's contributions to each fragment that moves and is kept here."""
    found = {
        fragment: rounds.contributed(run.state, fragment, island)
        for fragment in range(len(run.state.rounds))
        if fragment not in run.state.schedule.elsewhere
    }
    return [
        pb.Contributed(
            fragment=fragment, oldest_round=oldest, open_round=run.state.rounds[fragment].round, rounds=counted
        )
        for fragment, (oldest, counted) in found.items()
    ]


def status(run: Run) -> pb.StatusReply:
    """Everything an operator sees."""
    return pb.StatusReply(
        run_id=run.config.run.id,
        state=run_state(run),
        islands=[_island(run, member) for member in sorted(run.state.members.values(), key=lambda m: m.id)],
        rounds_committed=run.totals.committed,
        rounds_skipped=run.totals.skipped,
        rounds_aborted=run.totals.aborted,
        participation=fmean(run.participation.values()) if run.participation else math.nan,
        steps=run.config.run.steps,
        layout_digest=run.layout.digest if run.layout else "",
        parameters=run.layout.numel if run.layout else 0,
        config_toml=to_toml(run.config),
    )


def _island(run: Run, member: Member) -> pb.IslandStatus:
    progress = run.progress[member.id]
    return pb.IslandStatus(
        id=member.id,
        state=member.standing,
        epoch=member.epoch,
        ranks=member.ranks,
        progress=pb.HeartbeatRequest(
            step=progress.step,
            tokens=progress.tokens,
            tokens_per_second=progress.tokens_per_second,
            loss=progress.loss,
            outer_loss=progress.outer_loss,
            mfu=progress.mfu,
            bytes_up=progress.bytes_up,
            bytes_down=progress.bytes_down,
            ready=member.ready,
        ),
        contributions=member.contributions,
        dropped=member.dropped,
        reason=member.reason,
    )
