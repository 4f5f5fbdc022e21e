"""The coordinator's side of `Decline` where its service lacks the method."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from coordinator import rounds
from coordinator.answers import Context, answers, to_bytes
from coordinator.service import Service
from diloco.framing import SERVICE
from diloco.v1 import coordinator_pb2 as pb


class Extended(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """A service, and one that has what it lacks."""

    def __init__(self, *handlers: grpc.GenericRpcHandler[Any, Any]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next((method for method in found if method), None)


def teach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has services of this process answer `Decline`."""
    if hasattr(Service, "decline"):
        return

    @answers
    async def decline(self: Service, request: pb.DeclineRequest, context: Context) -> pb.Receipt:
        self._run.lease(request.run_id, request.island_id, request.epoch)
        key = {"fragment": request.fragment, "round": request.round, "island": request.island_id}
        await self._run.take(rounds.Spoiled(**key, epoch=request.epoch, reason=request.reason))
        return pb.Receipt(dropped=request.reason)

    plain = Service.handler

    def handler(self: Service) -> Extended:
        async def bound(request: pb.DeclineRequest, context: Context) -> pb.Receipt:
            return await decline(self, request, context)

        method = grpc.unary_unary_rpc_method_handler(
            bound,
            request_deserializer=pb.DeclineRequest.FromString,
            response_serializer=to_bytes,
        )
        return Extended(plain(self), grpc.method_handlers_generic_handler(SERVICE, {"Decline": method}))

    monkeypatch.setattr(Service, "handler", handler)
