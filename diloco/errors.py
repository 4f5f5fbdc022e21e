"""Every error this project raises on purpose.

    DilocoError
    ├── ConfigError              a setting is unknown, of the wrong type, out of range or at odds with another
    ├── InputError               a file, text or checkpoint that was named cannot be used
    ├── LayoutError              tensors or pieces that do not describe one model
    ├── CodecError               bytes that are not what their codec says
    ├── DivergedError            a loss or a contribution that is not finite
    ├── DigestMismatch           two holders of one version with different bits
    ├── EnvironmentFault         this machine lacks something: a free port, a device, a package
    ├── Unreachable              nobody answers at the coordinator's address
    │   └── Untrusted            only one end speaks TLS, or one does not accept the other's certificate
    ├── DeadlineExceeded         a bounded wait ended
    └── Refused                  the other side said no, and nothing was changed by the request
        ├── RunMismatch          another run or another model layout
        ├── StaleEpoch           a newer lease of the same island exists, or the lease ran out
        ├── Dismissed            an operator has ended the island's lease
        ├── Conflict             the same key with other content
        ├── Expired              what is asked for is no longer kept
        ├── Overload             a budget is spent; try again later
        └── Malformed            a request that no correct client sends

Each class has one row in `TABLE`: the gRPC status it travels as and the exit code a command ends with.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple


class DilocoError(Exception):
    """Base of all. `ids` name what the error is about (run, island, fragment, version ...)."""

    def __init__(self, message: str, **ids: object) -> None:
        super().__init__(message)
        self.message = message
        self.ids = ids

    def __str__(self) -> str:
        return self.message


class ConfigError(DilocoError):
    """A setting is unknown, of the wrong type, out of range or at odds with another."""


class InputError(DilocoError):
    """A file, text or checkpoint that was named cannot be used."""


class LayoutError(DilocoError):
    """Tensors or pieces that do not describe one model."""


class CodecError(DilocoError):
    """Bytes that are not what their codec says."""


class DivergedError(DilocoError):
    """A loss or a contribution that is not finite."""


class DigestMismatch(DilocoError):
    """Two holders of one version of a fragment have different bits."""


class EnvironmentFault(DilocoError):
    """This machine lacks something: a free port, a device, a package."""


class Unreachable(DilocoError):
    """Nobody answers at the coordinator's address."""


class Untrusted(Unreachable):
    """Only one end speaks TLS, or one does not accept the other's certificate."""


class DeadlineExceeded(DilocoError):
    """A bounded wait ended."""


class Refused(DilocoError):
    """The other side said no; the request changed nothing."""


class RunMismatch(Refused):
    """Another run or another model layout."""


class StaleEpoch(Refused):
    """A newer lease of the same island exists, or the lease ran out."""


class Dismissed(Refused):
    """An operator has ended the island's lease."""


class Conflict(Refused):
    """The same key with other content."""


class Expired(Refused):
    """What is asked for is no longer kept."""


class Overload(Refused):
    """A budget is spent; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0, **ids: object) -> None:
        super().__init__(message, **ids)
        self.retry_after_s = retry_after_s


class Malformed(Refused):
    """A request that no correct client sends."""


class Row(NamedTuple):
    """How an error leaves a process."""

    grpc_status: str
    exit_code: int


class ExitCode:
    """Exit codes of every command; `docs/exit-codes.md` explains them."""

    OK: ClassVar[int] = 0
    REFUSED: ClassVar[int] = 1
    UNREACHABLE: ClassVar[int] = 2
    TIMEOUT: ClassVar[int] = 3
    USAGE: ClassVar[int] = 4
    INTERNAL: ClassVar[int] = 5
    ENVIRONMENT: ClassVar[int] = 6
    DIVERGED: ClassVar[int] = 7
    AGAIN: ClassVar[int] = 75
    RESIZED: ClassVar[int] = 76
    INTERRUPTED: ClassVar[int] = 130


TABLE: dict[type[DilocoError], Row] = {
    DilocoError: Row("INTERNAL", ExitCode.INTERNAL),
    ConfigError: Row("INVALID_ARGUMENT", ExitCode.USAGE),
    InputError: Row("INVALID_ARGUMENT", ExitCode.USAGE),
    LayoutError: Row("INVALID_ARGUMENT", ExitCode.USAGE),
    CodecError: Row("INVALID_ARGUMENT", ExitCode.REFUSED),
    DivergedError: Row("INVALID_ARGUMENT", ExitCode.DIVERGED),
    DigestMismatch: Row("DATA_LOSS", ExitCode.INTERNAL),
    EnvironmentFault: Row("FAILED_PRECONDITION", ExitCode.ENVIRONMENT),
    Unreachable: Row("UNAVAILABLE", ExitCode.UNREACHABLE),
    Untrusted: Row("UNAUTHENTICATED", ExitCode.UNREACHABLE),
    DeadlineExceeded: Row("DEADLINE_EXCEEDED", ExitCode.TIMEOUT),
    Refused: Row("FAILED_PRECONDITION", ExitCode.REFUSED),
    RunMismatch: Row("FAILED_PRECONDITION", ExitCode.REFUSED),
    StaleEpoch: Row("FAILED_PRECONDITION", ExitCode.AGAIN),
    Dismissed: Row("FAILED_PRECONDITION", ExitCode.REFUSED),
    Conflict: Row("ALREADY_EXISTS", ExitCode.REFUSED),
    Expired: Row("NOT_FOUND", ExitCode.REFUSED),
    Overload: Row("RESOURCE_EXHAUSTED", ExitCode.REFUSED),
    Malformed: Row("INVALID_ARGUMENT", ExitCode.REFUSED),
}

BY_NAME: dict[str, type[DilocoError]] = {kind.__name__: kind for kind in TABLE}


def exit_code(error: DilocoError) -> int:
    """The exit code of a command that ends with `error`."""
    return TABLE[type(error)].exit_code
