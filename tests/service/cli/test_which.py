"""Which job a person means, and the short ids that tables show."""

from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from service.cli.client import check_names
from service.cli.main import app
from service.cli.which import find_handoff, find_job, meant_jobs, short_handoffs, short_jobs


def job(name: str, random: str, state: str = "running") -> dict:
    return {"job_id": f"{name}-{random}", "name": name, "state": state}


JOBS = [
    job("gpt", "1a2b3c4d"),
    job("gpt-small", "1a99ffff"),
    job("gpt-small", "77777777", "finished"),
    job("bert", "00000001"),
]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("gpt-1a2b3c4d", ["gpt-1a2b3c4d"]),
        ("gpt", ["gpt-1a2b3c4d"]),  # a name wins over the beginning of another
        ("gpt-s", ["gpt-small-1a99ffff", "gpt-small-77777777"]),
        ("gpt-small", ["gpt-small-1a99ffff"]),  # the one that goes on
        ("77", ["gpt-small-77777777"]),
        ("1a", ["gpt-1a2b3c4d", "gpt-small-1a99ffff"]),
        ("b", ["bert-00000001"]),
        ("none", []),
    ],
)
def test_a_whole_id_wins_over_a_name_and_a_name_over_a_beginning(text: str, meant: list[str]):
    assert [found["job_id"] for found in meant_jobs(JOBS, text)] == meant


def test_of_jobs_of_one_name_none_is_chosen_where_several_or_none_go_on():
    for states in (("running", "pending"), ("finished", "failed")):
        same = [job("gpt", f"0000000{at}", state) for at, state in enumerate(states)]
        assert meant_jobs(same, "gpt") == same


def test_a_job_is_shown_by_the_random_part_of_its_id_unless_another_has_the_same():
    cells = short_jobs(["gpt-1a2b3c4d", "bert-1a2b3c4d", "gpt-77777777", "gpt-77777777"])
    assert {job_id: cell.shown for job_id, cell in cells.items()} == {
        "gpt-1a2b3c4d": "gpt-1a2b3c4d", "bert-1a2b3c4d": "bert-1a2b3c4d", "gpt-77777777": "77777777",
    }  # fmt: skip
    assert all(cell.whole == job_id for job_id, cell in cells.items())


def test_a_handoff_is_shown_by_as_much_of_its_id_as_tells_it_apart():
    ids = [
        "2f1c9a52-8f5e-4d6b-9d53-0b6f5c6d7e8f",
        "2f1c9a52-8f5e-4d6b-9d53-0b6f5c6d7e80",
        "aaaaaaaa-8f5e-4d6b-9d53-0b6f5c6d7e80",
    ]
    shown = [cell.shown for cell in map(short_handoffs(ids).__getitem__, ids)]
    assert shown == [*ids[:2], "aaaaaaaa"]


@pytest.mark.parametrize("find", [find_job, find_handoff])
def test_an_empty_name_is_none(find: Any, capsys: pytest.CaptureFixture[str]):
    """As of a variable of a script that is not set: the only job would be meant."""
    with pytest.raises(typer.Exit):
        find(None, "")
    assert "is empty" in capsys.readouterr().err


def test_text_without_a_digit_of_an_id_is_no_handoff_though_there_is_only_one(capsys: pytest.CaptureFixture[str]):
    client: Any = SimpleNamespace(get=lambda *_, **__: [{"handoff_id": "2f1c9a52-8f5e-4d6b-9d53-0b6f5c6d7e8f"}])
    assert find_handoff(client, "2F1c").startswith("2f1c9a52")
    with pytest.raises(typer.Exit):
        find_handoff(client, "-")
    assert "there is no handoff '-'" in capsys.readouterr().err


def test_prices_of_a_pool_without_a_name_are_not_those_of_all():
    done = CliRunner().invoke(app, ["prices", "list", "--pool", ""], env={"LIVER_TOKEN": "liver_a_b"})
    assert done.exit_code == 1
    assert "no name may be empty" in done.stderr


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/nodes/",
        "/api/v1/nodes/./drain",
        "/api/v1/pools//price",
        "/api/v1/nodes/..",
        "/api/v1/pools/a%2Fb/price",
    ],
)
def test_no_name_makes_another_address_of_the_one_that_is_asked(path: str, capsys: pytest.CaptureFixture[str]):
    check_names("/api/v1/nodes?limit=5")
    check_names("/api/v1/nodes/a.b")
    with pytest.raises(typer.Exit):
        check_names(path)
    assert "no name may be empty, or . or .., or have / in it" in capsys.readouterr().err
