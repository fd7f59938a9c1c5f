"""Whose address pays for a wrong token, and which scheme a cookie is for: over real connections, as `liver serve` has
them."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from service.cli.main import app as liver
from service.db.engine import StartError
from service.edge import gate
from service.server import bind, config_of
from service.settings import PROXIES_MAX, ServiceSettings

PER_S = 3
SESSION = "/api/v1/session"


@pytest.fixture
def settings(tmp_path):
    return ServiceSettings(data_dir=tmp_path, reconcilers=False, requests_per_s=PER_S)


@pytest.fixture(autouse=True)
def no_budget_grows(monkeypatch) -> None:
    monkeypatch.setattr(gate, "monotonic", lambda: 1_000.0)


@contextlib.contextmanager
def served(app, settings: ServiceSettings, host: str = "127.0.0.1") -> Iterator[httpx.Client]:
    """A client on this machine, of the application as it is served with these settings."""
    listener = bind(host, 0)
    config = config_of(app, settings)
    config.lifespan = "off"  # The test's own client has begun it.
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=10) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def trusting(settings: ServiceSettings, proxies: str) -> ServiceSettings:
    given: dict[str, Any] = settings.model_dump(include={"data_dir", "reconcilers"}) | {"trusted_proxies": proxies}
    return ServiceSettings(**given)


def tries(client: httpx.Client, addresses: list[str]) -> list[int]:
    """What wrong tokens get that come with these addresses as forwarded."""
    return [
        client.get(
            "/api/v1/jobs",
            headers={"Authorization": f"Bearer liver_{number:x}_{'x' * 43}", "X-Forwarded-For": address},
        ).status_code
        for number, address in enumerate(addresses)
    ]


def is_secure(client: httpx.Client, settings: ServiceSettings, **headers: str) -> bool:
    """Whether the cookie of a login is for HTTPS only."""
    token = (settings.data_dir / "tokens" / "operator.token").read_text().strip()
    answer = client.post(SESSION, json={"token": token}, headers=headers)
    assert answer.status_code == 201, answer.text
    return "secure" in answer.headers["set-cookie"].lower()


@pytest.mark.parametrize("proxies", ["", "192.0.2.7,2001:db8::/32"])
def test_an_address_that_a_caller_only_claims_pays_for_nothing(client, settings, proxies):
    with served(client.app, trusting(settings, proxies)) as outside:
        claimed = [f"192.0.2.{number}" for number in range(1, 2 * PER_S + 3)]
        assert tries(outside, claimed) == [401] * 2 * PER_S + [429, 429]


def test_a_scheme_that_a_caller_only_claims_is_not_that_of_its_cookie(client, settings):
    with served(client.app, settings) as outside:
        assert not is_secure(outside, settings, **{"X-Forwarded-Proto": "https"})


@pytest.mark.parametrize("proxies", ["127.0.0.1", "192.0.2.0/24, 127.0.0.0/8"])
def test_a_trusted_proxy_says_whose_address_pays_and_which_scheme_the_caller_speaks(client, settings, proxies):
    with served(client.app, trusting(settings, proxies)) as outside:
        claimed = [f"203.0.113.{number}" for number in range(1, 2 * PER_S + 3)]
        assert tries(outside, claimed) == [401] * (2 * PER_S + 2)
        # What stands before the address that the proxy added was the caller's own claim.
        several = [f"198.51.100.{number}, 203.0.113.100" for number in range(2 * PER_S + 1)]
        assert tries(outside, several) == [401] * 2 * PER_S + [429]
        assert is_secure(outside, settings, **{"X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.200"})
        assert not is_secure(outside, settings, **{"X-Forwarded-For": "203.0.113.200"})


def test_a_trusted_proxy_is_known_by_its_ipv4_address_where_the_service_listens_on_ipv6_too(client, settings):
    try:
        bind("::", 0).close()
    except StartError:
        pytest.skip("this machine has no IPv6")
    claimed = [f"203.0.113.{number}" for number in range(1, 2 * PER_S + 3)]
    with served(client.app, trusting(settings, "127.0.0.1"), "::") as outside:
        assert tries(outside, claimed) == [401] * len(claimed)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("*", "'*' does not appear to be"),
        ("10.0.0.7,proxy.local", "'proxy.local' does not appear to be"),
        ("10.0.0.7/8", "10.0.0.7/8 has host bits set"),
        ("10.0.0.7,,10.0.0.8", "'' does not appear to be"),
        (",".join(["10.0.0.7"] * (PROXIES_MAX + 1)), f"at most {PROXIES_MAX} addresses and networks, not 101"),
    ],
)
def test_proxies_that_cannot_be_meant_are_refused_by_name_at_the_start(tmp_path, given, said):
    command = ["serve", "--data-dir", str(tmp_path), "--port", "0"]
    as_option = CliRunner().invoke(liver, [*command, "--trusted-proxies", given])
    as_setting = CliRunner().invoke(liver, command, env={"LIVER_SERVICE_TRUSTED_PROXIES": given})
    for refused in (as_option, as_setting):
        output = " ".join(refused.output.split())
        assert refused.exit_code == 2, output
        assert "LIVER_SERVICE_TRUSTED_PROXIES: must" in output
        assert said in output
    assert list(tmp_path.iterdir()) == [], "nothing was begun"
