"""The island's `[nodes]` and `[preemption]`: the machines that an island is made of, and how one hears of its end."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from diloco.settings import Positive, Seconds, Settings


class NodesConfig(Settings):
    least: Positive = 1
    """Nodes without which the island does not train. On every node runs a daemon with the same settings."""
    most: Positive = 1
    """Nodes that train at most, with `mesh.ranks` / `most` ranks each. Up to here an island grows when a daemon comes,
    and shrinks when one goes; daemons beyond it are hot spares, which wait until one of the others is gone."""
    rendezvous: str = ""
    """HOST:PORT at which the daemons meet; the one that runs on HOST listens there. Needed for more than one node. Only
    the island's own network may reach it: torch's rendezvous neither encrypts nor authenticates."""
    last_call_s: Annotated[int, Field(ge=1)] = 10
    """How long the daemons that have met wait for more of them, once there are `least`."""
    gather_timeout_s: Annotated[int, Field(ge=1)] = 600
    """How long to wait for `least` nodes before giving up."""

    @model_validator(mode="after")
    def _fits(self) -> NodesConfig:
        if self.least > self.most:
            raise ValueError(
                f"nodes.least ({self.least}) is above nodes.most ({self.most}): set nodes.most={self.least} or more"
            )
        host, colon, port = self.rendezvous.rpartition(":")
        if self.rendezvous and not (colon and host and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(
                f"nodes.rendezvous ({self.rendezvous!r}) is not HOST:PORT: set for example "
                'nodes.rendezvous="10.0.0.5:29500"'
            )
        if self.most > 1 and not self.rendezvous:
            raise ValueError(
                f"nodes.most ({self.most}) needs nodes.rendezvous: the HOST:PORT at which this island's daemons meet"
            )
        return self


class PreemptionConfig(Settings):
    source: Annotated[str, Field(pattern=r"^(|aws|gcp|azure|file:.+|https?://.+)$")] = ""
    """Who says that this machine will soon be taken away: the metadata service of `aws`, `gcp` or `azure`; a file that
    appears (`file:PATH`); an URL that answers 200 once it is so. The island then leaves at the next step edge. Empty:
    nobody; SIGTERM and SIGUSR1 (Slurm) always do."""
    every_s: Seconds = 5.0
    """How often it is asked. A spot instance gets between 30 s and 2 min."""
