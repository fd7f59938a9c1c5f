"""The console's files: one page behind every address, nothing outside the build, and no script but its own."""

import pytest

from service.console import endpoints
from service.console.app_files import AppFiles

ANONYMOUS = {"Authorization": ""}


@pytest.fixture
def built(tmp_path, monkeypatch):
    folder = tmp_path / "app"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><script type=module src=/assets/main-1a2b.js></script>")
    (folder / "assets" / "main-1a2b.js").write_text("console.log(1);" * 100)
    (folder / "assets" / "main-1a2b.js.map").write_text("{}")
    (tmp_path / "secret.txt").write_text("no")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    monkeypatch.setattr(endpoints, "_app", AppFiles(folder))
    return folder


@pytest.mark.parametrize("path", ["/", "/login", "/jobs/gpt-1.5b-a1/logs", "/incidents/7"])
def test_every_address_of_the_console_is_its_one_page(client, built, path):
    answer = client.get(path, headers=ANONYMOUS)
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-cache")
    assert "/assets/main-1a2b.js" in answer.text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
    assert client.get(path, headers=ANONYMOUS | {"If-None-Match": answer.headers["etag"]}).status_code == 304


def test_assets_are_kept_for_ever_and_sent_compressed(client, built):
    answer = client.get("/assets/main-1a2b.js", headers=ANONYMOUS)
    assert (answer.headers["content-encoding"], answer.headers["content-type"]) == (
        "gzip",
        "text/javascript; charset=utf-8",
    )
    assert "immutable" in answer.headers["cache-control"] and answer.text.startswith("console.log(1);")
    plain = client.get("/assets/main-1a2b.js", headers=ANONYMOUS | {"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.text == answer.text


@pytest.mark.parametrize(
    "path", ["/assets/none.js", "/assets/main-1a2b.js.map", "/link.txt", "/secret.txt", "/assets/%2e%2e/index.html",
             "/assets/..%2f..%2fsecret.txt", "/index.html", "/b.js", "/assets/"]
)  # fmt: skip
def test_nothing_but_the_build_is_served(client, built, path):
    answer = client.get(path, headers=ANONYMOUS)
    assert answer.status_code == 404 and answer.text != "no"


def test_what_belongs_to_the_api_is_not_the_console(client, built):
    assert client.get("/api/v1/none").status_code == 404
    assert client.get("/api/v1/none", headers=ANONYMOUS).status_code == 401
    assert client.get("/agent/v1/none").status_code == 404
    assert client.get("/api/v1/jobs/x/stop").status_code == 405
    assert client.post("/").status_code == 405
    assert client.get("/healthz", headers=ANONYMOUS).json()["status"] == "ok"


def test_a_new_build_is_served_without_a_new_start_and_without_one_the_page_says_how_to_make_it(client, built):
    assert client.get("/assets/main-1a2b.js").status_code == 200
    (built / "assets" / "main-1a2b.js").rename(built / "assets" / "main-3c.js")
    (built / "index.html").write_text("<!doctype html><p>another</p>")
    assert "another" in client.get("/").text
    assert client.get("/assets/main-3c.js").status_code == 200
    (built / "index.html").unlink()
    answer = client.get("/jobs/x", headers=ANONYMOUS)
    assert answer.status_code == 200 and "make console" in answer.text
