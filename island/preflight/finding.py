"""What a check has found, and how a check is bounded in time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from diloco.errors import ConfigError, DilocoError, ExitCode, exit_code

Verdict = Literal["ok", "warn", "fail"]

ADVICE = {
    ExitCode.REFUSED: "do what it says; nothing was changed",
    ExitCode.UNREACHABLE: "do what it says; else see that the coordinator runs, and what is between the two",
    ExitCode.TIMEOUT: "see what is slow, and try again",
    ExitCode.USAGE: "correct the setting or the file that it names",
    ExitCode.ENVIRONMENT: "let this machine and user have what it names",
}
"""What to do about an error, by the exit code it stands for."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of a preflight."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""
    """What to do; empty where there is nothing."""
    code: int = ExitCode.OK
    """Exit code that a failure ends with."""


def ok(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check=check, verdict="ok", found=found)


def warn(check: str, found: str, advice: str) -> Finding:
    """It will work, and not well; or it could not be looked at."""
    return Finding(check=check, verdict="warn", found=found, advice=advice)


def fail(check: str, found: str, advice: str, code: int) -> Finding:
    """An island would end with exit code `code`."""
    return Finding(check=check, verdict="fail", found=found, advice=advice, code=code)


def bounded(check: str, bound_s: float, work: Callable[[], Finding]) -> Finding:
    """What `work` finds. A foreseen error is a failure, and so is a check that does not end within `bound_s`.

    A check that hangs, as on a dead network file system, is left behind on its thread.
    """
    answers: queue.SimpleQueue[Finding | BaseException] = queue.SimpleQueue()

    def look() -> None:
        try:
            answers.put(work())
        except BaseException as error:  # noqa: BLE001  (raised again by whoever waits)
            answers.put(error)

    threading.Thread(target=look, name=f"preflight {check}", daemon=True).start()
    try:
        answer = answers.get(timeout=bound_s)
    except queue.Empty:
        return fail(check, f"did not end within {bound_s:g} s", "see what holds it up, and try again", ExitCode.TIMEOUT)
    if isinstance(answer, DilocoError):
        code = exit_code(answer)
        return fail(check, answer.message, ADVICE.get(code, "look at docs/exit-codes.md"), code)
    if isinstance(answer, OSError):
        return fail(check, str(answer), ADVICE[ExitCode.ENVIRONMENT], ExitCode.ENVIRONMENT)
    if isinstance(answer, BaseException):
        raise answer
    return answer


@contextmanager
def of_others(what: str) -> Iterator[None]:
    """Within it runs code that is not ours and raises what it likes: all but typed errors become a `ConfigError`."""
    try:
        yield
    except (DilocoError, OSError):
        raise
    except Exception as error:
        raise ConfigError(f"{what} failed with {type(error).__name__}: {error}") from error
