"""Every scenario file gives exactly the output that is written in it; `pytest --rewrite` writes it anew."""

from pathlib import Path

import pytest

from tests.scenarios.script import parse, render, run_script

FILES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_scenario_gives_what_is_written_in_it(path: Path, request: pytest.FixtureRequest):
    text = path.read_text()
    result = render(run_script(parse(text)))
    if request.config.getoption("--rewrite"):
        path.write_text(result)
    else:
        assert result == text


def test_there_is_a_scenario_for_every_row_of_the_failure_table():
    assert {path.stem for path in FILES} >= {
        "target_dies",
        "source_dies",
        "service_away",
        "agent_dies",
        "store_dies",
        "another_notice",
    }
