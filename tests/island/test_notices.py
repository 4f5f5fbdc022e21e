"""What metadata services say of a machine that is about to be taken away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from island.config_nodes import PreemptionConfig
from island.notices import Notices, asked


class Metadata(BaseHTTPRequestHandler):
    """Answers as the clouds do, by the paths and headers that they ask for."""

    pages: dict[str, tuple[int, str]]

    def do_PUT(self) -> None:
        good = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200 if good else 400, "a-token")

    def do_GET(self) -> None:
        wanted = {"/latest": ("X-aws-ec2-metadata-token", "a-token"), "/computeMetadata": ("Metadata-Flavor", "Google")}
        wanted["/metadata"] = ("Metadata", "true")
        for start, (name, value) in wanted.items():
            if self.path.startswith(start) and self.headers[name] != value:
                self._answer(401, "")
                return
        self._answer(*self.pages.get(self.path, (404, "")))

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[tuple[str, dict[str, tuple[int, str]]]]:
    """A metadata service: its address, and its pages."""
    pages: dict[str, tuple[int, str]] = {}
    handler = type("Here", (Metadata,), {"pages": pages})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", pages
        server.shutdown()
        thread.join(10)


AZURE = "/metadata/scheduledevents?api-version=2020-07-01"


@pytest.mark.parametrize(
    ("source", "path", "calm", "going"),
    [
        ("aws", "/latest/meta-data/spot/instance-action", (404, ""), (200, '{"action": "terminate"}')),
        ("gcp", "/computeMetadata/v1/instance/preempted", (200, "FALSE"), (200, "TRUE\n")),
        (
            "azure",
            AZURE,
            (200, '{"Events": [{"EventType": "Reboot"}]}'),
            (200, '{"Events": [{"EventType": "Preempt"}]}'),
        ),
        ("azure", AZURE, (200, "{}"), (200, '{"Events": [{"EventType": "Freeze"}, {"EventType": "Preempt"}]}')),
    ],
)
def test_clouds(
    source: str,
    path: str,
    calm: tuple[int, str],
    going: tuple[int, str],
    service: tuple[str, dict[str, tuple[int, str]]],
) -> None:
    base, pages = service
    pages[path] = calm
    assert not asked(source, base=base)
    pages[path] = going
    assert asked(source, base=base)


def test_an_url_of_ones_own(service: tuple[str, dict[str, tuple[int, str]]]) -> None:
    base, pages = service
    assert not asked(f"{base}/drain")
    pages["/drain"] = 200, ""
    assert asked(f"{base}/drain")


def test_a_service_that_fails_is_told_of_once(
    service: tuple[str, dict[str, tuple[int, str]]], caplog: pytest.LogCaptureFixture
) -> None:
    base, pages = service
    pages["/drain"] = 500, ""
    notices = Notices(PreemptionConfig(source=f"{base}/drain"), lambda: None)
    assert not notices.look()
    assert not notices.look()
    assert len(caplog.messages) == 1
    pages["/drain"] = 200, ""
    assert notices.look()


def test_an_answer_that_is_no_json_is_no_notice(service: tuple[str, dict[str, tuple[int, str]]]) -> None:
    base, pages = service
    pages[AZURE] = 200, "<html>"
    with pytest.raises(OSError, match="something else than JSON"):
        asked("azure", base=base)


def test_it_is_told_once(tmp_path: Path) -> None:
    told, notice = threading.Event(), tmp_path / "notice"
    with Notices(PreemptionConfig(source=f"file:{notice}", every_s=0.01), told.set):
        assert not told.is_set()
        notice.touch()
        assert told.wait(30)


def test_without_a_source_nobody_is_asked() -> None:
    with Notices(PreemptionConfig(), lambda: None) as notices:
        assert not notices._thread.is_alive()
