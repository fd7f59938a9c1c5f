"""A real service with a played fleet, and Chromium in front of it.

Chromium is Debian's package, installed where that can be done here; no build of a browser is downloaded. Without it, or
without a build of the console, these tests are skipped and say so.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")

from playwright import sync_api

from tests.cluster.real_service import RealService, real_service, service_folder
from tests.debian import needs
from tests.e2e.story import SETTINGS, Story, story_in

ROOT = Path(__file__).parents[2]
APP = ROOT / "service" / "console" / "static" / "app" / "index.html"
AXE = ROOT / "service" / "console" / "web" / "node_modules" / "axe-core" / "axe.min.js"
SHOTS = ROOT / "build" / "screenshots"
SERVE = ("-m", "service.cli.main", "serve")
PATIENCE_MS = 45_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]  # fmt: skip
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Not for the session: while the driver is open its event loop runs, and no other test of the process could."""
    path = needs("chromium")
    if not APP.is_file():
        pytest.skip("the console is not built: make console")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, headless=True, args=FLAGS, timeout=90_000)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def service() -> Iterator[RealService]:
    with service_folder() as folder, real_service(RealService, folder, SERVE, SETTINGS) as service:
        yield service


@pytest.fixture(scope="session")
def story(service: RealService) -> Iterator[Story]:
    with story_in(service) as story:
        story.play()
        yield story


class Visitor:
    """One browser of one person. `errors`: what its console should not say; `clicks`: how many were made."""

    def __init__(self, browser: Any, url: str, token: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(**({"viewport": WIDE} | options))
        self.context.set_default_timeout(PATIENCE_MS)
        self.context.set_default_navigation_timeout(PATIENCE_MS)
        if token:
            answer = self.context.request.post(f"{url}/api/v1/session", data={"token": token})
            assert answer.status == 201, answer.text()
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.clicks = 0
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._said)

    def _said(self, message: Any) -> None:
        # That a request was refused or found nothing is the page's business, not an error of the page.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def go(self, path: str) -> None:
        """Open an address, and wait until its panels are filled."""
        self.page.goto(f"{self.url}{path}", wait_until="domcontentloaded")
        self.settle()

    def settle(self) -> None:
        """No panel is loading any more."""
        sync_api.expect(self.page.locator("main")).not_to_be_empty(timeout=PATIENCE_MS)
        sync_api.expect(self.page.locator(".skeleton")).to_have_count(0, timeout=PATIENCE_MS)

    def click(self, locator: Any) -> None:
        """A click that counts."""
        self.clicks += 1
        locator.click()

    def sees(self, text: Any) -> None:
        """It stands somewhere on the screen, now or soon."""
        sync_api.expect(self.page.locator("main")).to_contain_text(text, timeout=PATIENCE_MS)

    def violations(self) -> list[str]:
        """What axe-core calls serious or critical."""
        if not AXE.is_file():
            pytest.skip("axe-core is not here: make console")
        # Through the debugger, since the page's policy lets in no other script.
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("async () => (await axe.run(document, {resultTypes: ['violations']})).violations")
        return [
            f"{item['id']}: {item['help']}: {node['html'][:150]}"
            for item in found
            if item["impact"] in ("serious", "critical")
            for node in item["nodes"][:3]
        ]


@pytest.fixture
def visit(browser: Any, service: RealService) -> Iterator[Callable[..., Visitor]]:
    """Makes visitors with a token of a role, or with none."""
    made: list[Visitor] = []

    def make(role: str | None = "operator", *, token: str = "", **options: Any) -> Visitor:
        made.append(Visitor(browser, service.url, token or (service.token(role) if role else ""), **options))
        return made[-1]

    yield make
    for visitor in made:
        visitor.context.close()
    assert not [error for visitor in made for error in visitor.errors]
