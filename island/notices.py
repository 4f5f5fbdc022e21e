"""Notices that a spot machine is about to be taken away: asks the cloud's metadata service, now and then.

| source | what is asked | what says so |
|---|---|---|
| `aws` | IMDSv2, `latest/meta-data/spot/instance-action` | 200 |
| `gcp` | `computeMetadata/v1/instance/preempted` | `TRUE` |
| `azure` | `metadata/scheduledevents` | an event of type `Preempt` |
| `file:PATH` | whether there is such a file | it is there |
| an URL | GET | 200 |
"""

from __future__ import annotations

import json
import logging
import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from urllib.error import HTTPError

from island.config_nodes import PreemptionConfig

ANSWER_S = 2.0
"""How long a metadata service may take."""
LINK_LOCAL = "http://169.254.169.254"
GCP = "http://metadata.google.internal"

log = logging.getLogger("diloco.island")
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Metadata services are on this machine's own link: no proxy is in between."""


def asked(source: str, *, base: str = "") -> bool:
    """Whether a source (`preemption.source`) says that the machine is about to be taken away.

    Args:
        base: of the metadata service, in place of the cloud's own.

    Raises:
        OSError: it does not answer, or with something else.
    """
    if source.startswith("file:"):
        return Path(source.removeprefix("file:")).exists()
    if source == "aws":
        base = base or LINK_LOCAL
        token = _get(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
        headers = {"X-aws-ec2-metadata-token": token}
        return _there(f"{base}/latest/meta-data/spot/instance-action", headers)
    if source == "gcp":
        url = f"{base or GCP}/computeMetadata/v1/instance/preempted"
        return _get(url, {"Metadata-Flavor": "Google"}).strip() == "TRUE"
    if source == "azure":
        url = f"{base or LINK_LOCAL}/metadata/scheduledevents?api-version=2020-07-01"
        events = _json(_get(url, {"Metadata": "true"})).get("Events", [])
        return any(event.get("EventType") == "Preempt" for event in events)
    return _there(source, {})


def _get(url: str, headers: Mapping[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    with _direct.open(request, timeout=ANSWER_S) as answer:
        text: str = answer.read(2**16).decode(errors="replace")
        return text


def _there(url: str, headers: Mapping[str, str]) -> bool:
    """Whether a page is there (200) or not (404)."""
    try:
        _get(url, headers)
    except HTTPError as error:
        if error.code == 404:
            return False
        raise
    return True


def _json(text: str) -> dict[str, list[dict[str, str]]]:
    try:
        found: dict[str, list[dict[str, str]]] = json.loads(text)
    except ValueError as error:
        raise OSError(f"the metadata service answers with something else than JSON: {error}") from error
    return found


class Notices:
    """Asks a source until it says yes once, on a thread of its own, while the context lasts.

    Args:
        config: whom to ask, and how often.
        told: is called once, on that thread.
    """

    def __init__(self, config: PreemptionConfig, told: Callable[[], None]) -> None:
        self._config, self._told = config, told
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="preemption", daemon=True)
        self._silent = False

    def __enter__(self) -> Notices:
        if self._config.source:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(2 * ANSWER_S)

    def _watch(self) -> None:
        while not self._over.wait(self._config.every_s):
            if self.look():
                log.warning("%s says that this machine will be taken away: leaving", self._config.source)
                self._told()
                return

    def look(self) -> bool:
        """Asks once. A source that fails is told of once, and is asked again."""
        try:
            found = asked(self._config.source)
        except OSError as error:
            if not self._silent:
                log.warning("preemption.source %s does not answer: %s; asking again", self._config.source, error)
            self._silent = True
            return False
        self._silent = False
        return found
