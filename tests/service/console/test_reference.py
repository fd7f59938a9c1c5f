"""The page /docs: the whole API, in a browser that may load nothing from elsewhere and run no script."""

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from service.console.reference import kind_of
from tests.tiers import sample

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Links(HTMLParser):
    """What a page refers to, what it runs, and what can be jumped to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "src", "action"):
                self.addresses.append(value or "")
            elif name == "style" or name.startswith("on"):
                self.inline.append(f"{tag} {name}")


@pytest.fixture
def page(client, settings) -> str:
    token = (settings.data_dir / "tokens" / "operator.token").read_text()
    client.post("/api/v1/session", json={"token": token})
    answer = client.get("/docs", headers={"Authorization": ""})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src" not in policy and "unsafe" not in policy
    return answer.text


@pytest.mark.thorough
def test_the_page_shows_every_operation_and_runs_and_loads_nothing_from_elsewhere(page, client):
    described = client.get("/api/v1/openapi.json").json()
    found = Links()
    found.feed(page)
    wanted = [operation["operationId"] for methods in described["paths"].values() for operation in methods.values()]
    assert set(wanted) | set(described["components"]["schemas"]) <= set(found.ids)
    assert len(found.ids) == len(set(found.ids))
    assert "script" not in found.tags and "style" not in found.tags and found.inline == []
    assert all(re.match(r"/[^/]|/$|#", address) for address in found.addresses), found.addresses
    assert {address[1:] for address in found.addresses if address.startswith("#")} <= set(found.ids)
    assert "Only in this state; may be given several times." in page


def test_without_a_session_the_way_leads_to_the_login(client):
    answer = client.get("/docs", headers={"Authorization": ""}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=/docs")


@contextmanager
def served(parts: dict[str, tuple[str, dict[str, str]]]) -> Iterator[str]:
    """Content and headers by path, on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text, headers = parts.get(self.path, ("", {}))
            self.send_response(200 if text else 404)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("is_spoilt", sample([False, True], False))
def test_a_browser_shows_the_page_within_its_policy(page, client, tmp_path: Path, is_spoilt):
    """With the headers that the service sends. A page that breaks the policy shows that the browser would say so."""
    answer = client.get("/docs", headers={"Authorization": ""})
    policy = {"Content-Security-Policy": answer.headers["content-security-policy"]}
    text = page.replace("</main>", "<script>1</script></main>") if is_spoilt else page
    style = client.get("/static/console.css")
    parts = {
        "/docs": (text, policy | {"Content-Type": "text/html; charset=utf-8"}),
        "/static/console.css": (style.text, {"Content-Type": style.headers["content-type"]}),
    }
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    with served(parts) as url:
        command += ["--enable-logging=stderr", "--v=0", "--dump-dom", f"{url}/docs"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert 'id="list_metrics"' in shown.stdout
    assert ("Content Security Policy" in shown.stderr) == is_spoilt, shown.stderr


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"$ref": "#/components/schemas/JobOut"}, "JobOut"),
        ({"type": "array", "items": {"$ref": "#/components/schemas/JobOut"}}, "list of JobOut"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "integer or null"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "object of number by name"),
        ({"enum": ["a", "b"]}, "a | b"),
        ({"const": "run"}, "'run'"),
        ({"type": "string", "format": "date-time"}, "string (date-time)"),
        ({}, "anything"),
    ],
)
def test_a_type_is_said_in_words(schema, text):
    assert kind_of(schema).text == text
