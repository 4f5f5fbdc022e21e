"""The method by which an island tries its line before it joins: bytes without meaning, up and down."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from coordinator.admission import Admission
from coordinator.answers import Context, answers
from diloco.errors import DeadlineExceeded, Malformed
from diloco.framing import PROBE_BYTES, PROBE_CHUNK_BYTES
from diloco.v1 import coordinator_pb2 as pb

PROBE_S = 30.0
"""Longest that a probe takes, whatever it has brought by then."""


class Probe:
    """The probe of `diloco.v1.Coordinator`. It keeps nothing of what comes, and needs no lease."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def methods(self) -> dict[str, Any]:
        """gRPC method handlers by name."""
        return {"Probe": grpc.stream_stream_rpc_method_handler(self.probe)}

    @answers
    async def probe(self, messages: AsyncIterator[bytes], context: Context) -> None:
        """Counts what comes, says how much it was, and sends what is asked for."""
        with self._admission.probe():
            try:
                async with asyncio.timeout(PROBE_S):
                    await self._exchange(aiter(messages), context)
            except TimeoutError:
                raise DeadlineExceeded(f"a probe of the line may take {PROBE_S:g} s") from None

    async def _exchange(self, messages: AsyncIterator[bytes], context: Context) -> None:
        try:
            request = pb.ProbeRequest.FromString(bytes(await anext(messages)))
        except (DecodeError, StopAsyncIteration):
            raise Malformed("a probe starts with a ProbeRequest") from None
        up = 0
        async for message in messages:
            up += len(message)
            _check(up)
        _check(request.down_bytes)
        await context.write(pb.ProbeReply(up_bytes=up).SerializeToString())
        chunk = os.urandom(PROBE_CHUNK_BYTES)  # which no line makes shorter
        for begin in range(0, request.down_bytes, len(chunk)):
            await context.write(chunk[: request.down_bytes - begin])


def _check(count: int) -> None:
    if count > PROBE_BYTES:
        raise Malformed(f"a probe of the line is at most {PROBE_BYTES} bytes each way, not {count}")
