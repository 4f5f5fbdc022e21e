"""The island: a full inner loop that joins a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diloco.tls import TLS

if TYPE_CHECKING:
    from island.config_checkpoint import CheckpointConfig
    from island.session import Session, join

__all__ = ["TLS", "CheckpointConfig", "Session", "join"]


def __getattr__(name: str) -> Any:
    """Imports the session, and with it torch, only when it is asked for: commands start quickly."""
    if name in __all__:
        from island import session

        return getattr(session, name)
    raise AttributeError(name)
