"""A short play of `make fuzz-api` against a real service, and that it can fail."""

import copy

import httpx
import pytest

pytest.importorskip("schemathesis")

from tests.fuzz.ground import ground
from tests.fuzz.play import Share, Tally, play
from tests.fuzz.run import ANY, NODE, SYNC, logged, of_node, unreadable

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(400)]
PRICES = "^/api/v1/pools/prices$"


def test_what_a_client_sends_meets_no_surprise_and_a_description_that_lies_is_found():
    with ground() as place:
        place.populate()
        described = httpx.get(f"{place.url}/api/v1/openapi.json", headers=place.headers("operator"), timeout=30).json()
        tally = Tally()
        for share in (
            Share(place.headers("admin"), ANY, 2, 40, borders=False),
            Share(place.node(NODE), SYNC, 12, 30, borders=False),
            Share(place.headers(None), ANY, 1, 20, borders=False),
        ):
            play(place.url, of_node(described, NODE), share, tally, seed=1)
        assert tally.shown == [] and not tally.failures
        assert tally.cases > 60
        assert {status for _, status in tally.answers} >= {200, 401, 403, 422}
        assert unreadable(place) == logged(place) == []

        lie, found = copy.deepcopy(described), Tally()
        operation = lie["paths"]["/api/v1/pools/prices"]["get"]
        operation["responses"]["200"]["content"]["application/json"]["schema"]["items"] = {"type": "integer"}
        del operation["responses"]["401"]
        play(place.url, lie, Share(place.headers("admin"), PRICES, 1, 20, borders=False), found, seed=1)
        play(place.url, lie, Share(place.headers(None), PRICES, 1, 20, borders=False), found, seed=1)
        checks = {check for _, check in found.failures}
        assert checks == {"response_schema_conformance", "status_code_conformance"}
