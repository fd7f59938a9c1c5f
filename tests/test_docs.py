"""What the documents show works: the job file in them is taken, and they leave no field out."""

import re
from pathlib import Path

import pytest

from agent.protocol.jobfile import JobFile, job_file_schema

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "job-file.md").read_text(encoding="utf-8")


def test_the_job_file_in_the_documents_is_a_valid_one():
    examples = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        JobFile.model_validate(yaml.safe_load(example))


def test_the_page_on_the_job_file_names_every_field_and_which_ones_are_needed():
    rows = dict(re.findall(r"^\| `(\w+)` \| (yes)?", PAGE, re.MULTILINE))
    schema = job_file_schema()
    assert set(rows) == set(schema["properties"])
    assert {name for name, needed in rows.items() if needed} == set(schema["required"])
