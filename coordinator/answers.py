"""How gRPC methods answer: errors travel by name, and what nobody foresaw is logged as well."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, cast

import grpc

from diloco.errors import TABLE, DilocoError, Overload
from diloco.framing import RETRY_AFTER

log = logging.getLogger("diloco.coordinator")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
DISK_RETRY_S = 1.0
"""What whoever needs the disk is told to wait while it fails."""
REASON_LIMIT = 600
"""Longest reason that travels, in characters: gRPC bounds a call's metadata to 8 KiB, and one character may take 12."""


async def abort(context: Context, error: DilocoError) -> None:
    """Ends a call with the error's status, message and class name."""
    metadata = [("diloco-error", type(error).__name__)]
    if isinstance(error, Overload):
        metadata.append((RETRY_AFTER, str(round(error.retry_after_s * 1000))))
    context.set_trailing_metadata(tuple(metadata))
    await context.abort(getattr(grpc.StatusCode, TABLE[type(error)].grpc_status), error.message[:REASON_LIMIT])


def answers(
    method: Callable[Concatenate[S, P], Awaitable[R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Sends a method's foreseen errors to the caller, and its unforeseen ones to the log as well."""

    @wraps(method)
    async def wrapped(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await method(self, *args, **kwargs)
        except DilocoError as error:
            await abort(cast(Context, args[-1]), error)
        except OSError as error:
            log.error("%s: the disk fails: %s", method.__name__, error)
            refusal = Overload(f"the coordinator cannot store this: {error}", retry_after_s=DISK_RETRY_S)
            await abort(cast(Context, args[-1]), refusal)
        raise AssertionError("abort raises")

    return wrapped


def to_bytes(message: Any) -> bytes:
    """Serializes any protobuf message."""
    return cast(bytes, message.SerializeToString())
