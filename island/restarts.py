"""When ranks that failed are started again, and when the island gives up."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

from diloco.errors import ExitCode

REST_S = 1.0
"""The first rest before ranks are started again; each one is twice as long as the one before it."""
LONGEST_REST_S = 60.0

FINAL = (ExitCode.REFUSED, ExitCode.UNREACHABLE, ExitCode.USAGE, ExitCode.ENVIRONMENT, ExitCode.DIVERGED)
"""Exit codes that another attempt would end with again."""

log = logging.getLogger("diloco.island")


class GivenUp(Exception):
    """The ranks are not started again. `code`: the exit code of the island."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


class Restarts:
    """Counts failures in a row: a crash that repeats ends the island, and one now and then in a long run does not.

    Args:
        name: of the island, for people.
        most: failures in a row after which ranks are still started again.
        progress: a file that ranks touch with every update they apply; failures count from there.
        logs: folder of the ranks' logs, or "".
        sleep: rests so many seconds; raises where a signal comes meanwhile.
    """

    def __init__(self, name: str, most: int, progress: Path, logs: str, sleep: Callable[[float], None]) -> None:
        self._name, self._most, self._progress, self._logs, self._sleep = name, most, progress, logs, sleep
        self._failures = 0

    def failed(self, code: int) -> None:
        """Rests after ranks ended with `code`, longer and longer, and not for as long everywhere.

        Raises:
            GivenUp: they are not to be started again.
        """
        self._failures = 1 if self._progress.exists() else self._failures + 1
        self._progress.unlink(missing_ok=True)
        if code not in FINAL or self._logs:
            where = f"; its log is in {self._logs}" if self._logs else ""
            log.error(
                "island %s: a rank failed with exit code %d (failure %d)%s", self._name, code, self._failures, where
            )
        if code in FINAL or self._failures > self._most:
            raise GivenUp(code)
        self._sleep(rest_s(self._failures))


def rest_s(failures: int) -> float:
    """Seconds of rest after so many failures in a row, 1 or more."""
    return min(LONGEST_REST_S, REST_S * 2.0 ** min(failures - 1, 10)) * random.uniform(0.5, 1.0)
