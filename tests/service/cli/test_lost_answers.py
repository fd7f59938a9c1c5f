"""A client verb whose answer is lost asks again under the same key."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

pytest.importorskip("typer")

import typer

from service.cli import client as cli
from service.cli.client import ServiceClient, Token, Trust


@pytest.fixture
def serve(monkeypatch) -> Iterator[Callable[..., tuple[ServiceClient, list]]]:
    monkeypatch.setattr(cli, "SEND_AGAIN_S", 0.0)
    monkeypatch.setattr(cli, "AFTER_S_MAX", 0.0)
    servers: list[HTTPServer] = []

    def start(*statuses: int) -> tuple[ServiceClient, list]:
        """A service that answers with these, one after the other; 0: it takes the request and answers nothing."""
        left, seen = list(statuses), []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                seen.append((self.headers["idempotency-key"], body))
                self.answer()

            def do_GET(self) -> None:
                seen.append(self.path)
                self.answer()

            def answer(self) -> None:
                status = left.pop(0)
                if status:
                    content = json.dumps({"detail": "no", "title": "no", "job_id": "j"}).encode()
                    self.send_response(status)
                    self.send_header("content-length", str(len(content)))
                    if status in (429, 503):
                        self.send_header("retry-after", "3")
                    self.end_headers()
                    self.wfile.write(content)
                self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        return ServiceClient(url, Token("t", "a test"), Trust(None)), seen

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_request_without_an_answer_is_sent_again_under_its_key(serve):
    client, seen = serve(0, 503, 201)
    assert client.post("/api/v1/jobs", content=b"name: x")["job_id"] == "j"
    assert len(seen) == 3 and len(set(seen)) == 1 and len(seen[0][0]) >= 16
    again, seen_then = serve(201)
    again.post("/api/v1/jobs", content=b"name: x")
    assert seen_then[0][0] != seen[0][0], "another command is another request"


@pytest.mark.parametrize("statuses", [(0, 0, 0), (503, 503, 503), (409,), (422,), (500,)])
def test_it_ends_after_three_and_with_the_first_answer_that_is_final(serve, statuses, capsys):
    client, seen = serve(*statuses)
    with pytest.raises(typer.Exit):
        client.post("/api/v1/jobs", content=b"")
    assert len(seen) == len(statuses) and capsys.readouterr().err.startswith("error: no")


def test_a_read_that_is_refused_for_now_is_sent_again_when_the_answer_says(serve, monkeypatch):
    waits_s: list[float] = []
    client, seen = serve(503, 429, 200)
    monkeypatch.setattr(cli, "AFTER_S_MAX", 2.5)
    monkeypatch.setattr(cli.time, "sleep", waits_s.append)
    assert client.get("/api/v1/jobs/j/logs", after=7)["job_id"] == "j"
    assert seen == ["/api/v1/jobs/j/logs?after=7"] * 3 and waits_s == [2.5, 2.5]


@pytest.mark.parametrize("statuses", [(503, 503, 503), (404,), (500,)])
def test_a_read_ends_after_three_and_with_the_first_answer_that_is_final(serve, statuses, capsys):
    client, seen = serve(*statuses)
    with pytest.raises(typer.Exit):
        client.listed("/api/v1/jobs", limit=5)
    assert len(seen) == len(statuses) and capsys.readouterr().err.startswith("error: no")


def test_a_stream_that_is_refused_for_now_counts_as_one_that_broke(serve):
    client, _ = serve(503)
    with pytest.raises(ConnectionError, match="status 503"), client.events("/api/v1/jobs/j/watch"):
        """Never begun."""
