"""The two cores and nothing else: replicas, rounds and folds of a run joined in one thread, without gRPC or disks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from coordinator import rounds
from coordinator.facts import Committed, Entry, Fact, Phase
from coordinator.fold import Outer, Part, fold
from coordinator.state import begin
from diloco.codec.policy import down_choice, up_choice
from diloco.config import RunConfig
from diloco.digest import combine
from diloco.fragments import partition
from diloco.layout import Box, Layout, Piece, TensorSpec, box_of, local, named_tensors
from diloco.replica import Held, Position, Replica
from diloco.schedule import Schedule, Send


class Loopback:
    """A run of single-rank islands in lockstep.

    Args:
        config: the run's settings.
        models: one per island, with equal first parameters.
    """

    def __init__(self, config: RunConfig, models: Sequence[nn.Module]) -> None:
        self.config = config
        self.islands = [f"island-{i}" for i in range(len(models))]
        self.layout = Layout(
            TensorSpec(name, tuple(tensor.shape), kind) for name, tensor, kind in named_tensors(models[0])
        ).under(config.sync.buffers)
        self.fragments = partition(self.layout, config.sync)
        self.schedule = Schedule.of(config)
        self.replicas = [self._replica(model) for model in models]
        self.outers = [Outer.first(f, self._flat(self.replicas[0], f.index)) for f in self.fragments]
        self.history: list[list[Outer]] = [[outer.copy()] for outer in self.outers]
        self.updates: dict[tuple[int, int], Tensor] = {}
        self.step = 0
        self.now = 0.0
        self.state = begin(config.rounds, config.merge.weights, self.schedule)
        self._take(rounds.Joined(island=i) for i in self.islands)
        self._take([rounds.Seeded()])
        self.epochs = {i: self.state.members[i].epoch for i in self.islands}
        self._take(rounds.Beat(island=i, epoch=self.epochs[i], ready=True) for i in self.islands)
        assert self.state.phase is Phase.RUNNING

    def edge(self, tokens: Sequence[int]) -> None:
        """What follows an inner step of all islands, which counted `tokens` tokens since the last adoption."""
        self.step += 1
        for action in self.schedule.due(self.step):
            if isinstance(action, Send):
                self._contribute(action.fragment, action.round, tokens)
            else:
                self._apply(action.fragment, action.round)

    def _contribute(self, fragment: int, round_: int, tokens: Sequence[int]) -> None:
        parts: dict[str, list[Part]] = {}
        for island, replica in zip(self.islands, self.replicas, strict=True):
            payloads = replica.encode(fragment, replica.stage(fragment))
            parts[island] = [
                Part(pieces=[held.piece], codecs=[replica.up.of(held.spec)], payload=payload)
                for held, payload in zip(replica.owned(fragment), payloads, strict=True)
            ]
        for i, island in enumerate(self.islands):
            entry = Entry(island=island, epoch=self.epochs[island], tokens=tokens[i])
            for decision in self._take([rounds.Contributed(fragment=fragment, round=round_, entry=entry)]):
                if isinstance(decision, Committed):
                    down = down_choice(self.config.wire)
                    chart, outer = self.fragments[fragment], self.outers[fragment]
                    new, update = fold(chart, outer, parts, decision.shares, self.config.outer, down)
                    self.outers[fragment], self.updates[fragment, round_] = new, update
                    self.history[fragment].append(new.copy())

    def _apply(self, fragment: int, round_: int) -> None:
        for replica in self.replicas:
            replica.decode(replica.owned(fragment), self.updates[fragment, round_])
            replica.position[fragment] = Position(self.outers[fragment].version, round_ + 1)
            replica.mix(fragment)
            assert combine(replica.digest_parts(fragment)[0]) == self.outers[fragment].digest

    def _take(self, events: object) -> list[Fact]:
        out: list[Fact] = []
        for event in events:  # type: ignore[attr-defined]
            self.state, decisions = rounds.step(self.state, event, self.now)
            out += decisions
        return out

    def _replica(self, model: nn.Module) -> Replica:
        tensors = {name: tensor for name, tensor, _ in named_tensors(model)}
        held = [
            Held(
                piece=Piece(t, Box.whole(spec.shape)),
                spec=spec,
                start=fragment.starts[i],
                local=local(tensors[spec.name]),
                owners=(0,),
            )
            for fragment in self.fragments
            for i, (t, spec) in enumerate(zip(fragment.tensors, fragment.specs, strict=True))
        ]
        assert all(box_of(tensors[h.spec.name]) == h.box for h in held)
        wire = self.config.wire
        return Replica(
            rank=0,
            fragments=self.fragments,
            held=held,
            up=up_choice(wire),
            down=down_choice(wire),
            alpha=self.config.sync.alpha,
        )

    @staticmethod
    def _flat(replica: Replica, fragment: int) -> Tensor:
        import torch

        return torch.cat([held.anchor.flatten() for held in replica.held(fragment)])
