"""Tables at the width of a terminal and in a pipe: what stands where, and that no word is ever broken."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.cli.columns import GAP, Cell, Column, Kind, escaped, fitted, fitted_pairs, fitted_text, tabbed
from service.cli.handoffs import LIST as HANDOFFS
from service.cli.jobs import LIST as JOBS
from service.cli.nodes import LIST as NODES
from service.cli.output import names, seconds, short_layout, size

REASON = "node-d goes at 12:01:30; every other member stays, three pipeline stages of four layers each fit what is left"
WIDE = "TP8xPP16xDP128"

JOB_ROWS = [
    ("5affa977", "gpt-small", "running", "TP2xPP2", "4", "7/1000", "5 s ago", REASON),
    ("6c0cb8ba", "a-rather-long-name-of-a-job_2", "pending", "-", "0", "0/1000", "2 min ago", "waiting"),
]
HANDOFF_ROWS = [
    ("18b53dcd", "5affa977", f"{WIDE} -> {WIDE}", "cutting_over", "0.215 s", "24.4 MB", "9 s ago", "2", "notice",
     "stop_and_copy", REASON),
    ("2f1c9a52", "5affa977", "PP2 -> PP3", "proposed", "-", "-", "now", "-", "grow", "live", ""),
]  # fmt: skip


def text_of(columns, rows, width: int) -> str:
    return "\n".join(line.text for line in fitted(columns, rows, width=width))


def golden(text: str) -> str:
    return text.strip("\n")


def test_jobs_at_80_columns():
    assert text_of(JOBS, JOB_ROWS, 80) == golden("""
JOB       NAME                        STATE    LAYOUT   NODES    STEP  SUBMITTED
5affa977  gpt-small                   running  TP2xPP2      4  7/1000  5 s ago
  node-d goes at 12:01:30; every other member stays, three pipeline stages of
  four layers each fit what is left
6c0cb8ba  a-rather-long-name-of-a-    pending  -            0  0/1000  2 min ago
          job_2
  waiting
""")


def test_handoffs_between_wide_layouts_at_80_columns():
    assert text_of(HANDOFFS, HANDOFF_ROWS, 80) == golden("""
HANDOFF   JOB       LAYOUTS              STATE           PAUSE    MOVED  OPENED
18b53dcd  5affa977  TP8xPP16xDP128 ->    cutting_over  0.215 s  24.4 MB  9 s ago
                    TP8xPP16xDP128
  generation 2, notice, stop_and_copy, node-d goes at 12:01:30; every other
  member stays, three pipeline stages of four layers each fit what is left
2f1c9a52  5affa977  PP2 -> PP3           proposed            -        -  now
  grow, live
""")


def test_a_wider_terminal_has_the_reason_in_the_line():
    lines = text_of(JOBS, JOB_ROWS, 140).splitlines()
    assert lines[0].endswith("SUBMITTED  REASON")
    assert lines[1].startswith("5affa977") and "node-d goes at" in lines[1]
    assert text_of(JOBS, JOB_ROWS, 300).splitlines()[1].endswith(REASON)


def test_where_not_even_the_words_fit_each_row_becomes_a_block():
    assert text_of(
        NODES, [("a.long.node.name", "ready", "1", "5affa977", "1 s ago", "-", "aws", "pool", "nobody", "aws-imds")], 30
    ) == golden("""
NODE         a.long.node.name
STATE        ready
SLOTS        1
JOB          5affa977
HEARD        1 s ago
NOTICE       -
PROVIDER     aws
POOL         pool
JOBS RUN AS  nobody
NOTICES BY   aws-imds
""")


def test_what_is_left_out_of_a_long_sentence_shows_and_what_says_nothing_is_left_out():
    columns = (Column("A"), Column("B", below=True, label="by"), Column("C", below=True))
    rows = [("x", "-", "word " * 100), ("y", "z", "")]
    lines = fitted(columns, rows, width=30)
    assert [line.kind for line in lines] == [Kind.HEAD, Kind.ROW, Kind.BELOW, Kind.BELOW, Kind.ROW, Kind.BELOW]
    assert lines[3].text.endswith(" …")
    assert lines[5].text == "  by z"


def test_a_pipe_gets_whole_values_with_one_tab_between_and_nothing_else():
    columns = (Column("JOB"), Column("REASON", below=True))
    rows = [(Cell("5affa977", "gpt-small-5affa977"), "a\ttab,\na line, \x1b[31mand colour")]
    assert tabbed(columns, rows) == ["JOB\tREASON", "gpt-small-5affa977\ta tab, a line, \\u001b[31mand colour"]


def test_control_characters_never_reach_a_terminal():
    assert text_of((Column("A"),), [("\x1b[2Jgone\r\n\x07",)], 80) == "A\n\\u001b[2Jgone \\u0007"


def test_what_turns_the_direction_of_writing_is_escaped_and_json_stays_what_it_was():
    turned = {
        "text": "loss \u202e0.1\u2069 \\\u202a \x9b31m\x7f \N{GRINNING FACE} \N{HEBREW LETTER ALEF}",
        "more": ["\t\n\r"],
    }
    written = escaped(json.dumps(turned, ensure_ascii=False, indent=2))
    assert json.loads(written) == turned
    assert "\\u202e0.1\\u2069" in written
    assert {c for c in written if not c.isprintable()} == {"\n"}


def test_details_are_folded_under_their_values():
    lines = fitted_pairs([("state", "running: " + REASON), ("layout", WIDE)], width=60)
    assert lines == [
        "state   running: node-d goes at 12:01:30; every other member",
        "        stays, three pipeline stages of four layers each fit",
        "        what is left",
        "layout  TP8xPP16xDP128",
    ]


def test_an_error_is_folded_with_what_follows_indented():
    assert fitted_text("  stop.steps: must be at least 1, is 0", width=28) == [
        "  stop.steps: must be at",
        "    least 1, is 0",
    ]


WORD = st.text(st.sampled_from("abcTP128xDP"), min_size=1, max_size=14)
SENTENCE = st.lists(WORD, max_size=30).map(" ".join)


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(st.tuples(WORD, SENTENCE, WORD, SENTENCE), min_size=1, max_size=4), width=st.integers(24, 200))
def test_every_line_fits_and_every_word_is_whole(rows: list[tuple[str, ...]], width: int):
    columns = (Column("ID"), Column("NODES"), Column("STEP", right=True), Column("WHY", below=True))
    lines = fitted(columns, rows, width=width)
    assert all(len(line.text) <= width and line.text == line.text.rstrip() for line in lines)
    known = {word for row in rows for cell in row for word in cell.split()} | {"ID", "NODES", "STEP", "WHY", "…"}
    assert {word for line in lines for word in line.text.replace(",", "").split()} <= known
    words = [word for line in lines for word in line.text.split()]
    for row in rows:
        assert all(word in words for word in (row[0], row[2], *row[1].split())), "only sentences below are shortened"


def test_columns_are_a_gap_apart():
    (head, row) = fitted((Column("A"), Column("B")), [("aaa", "b")], width=80)
    assert row.text == "aaa" + " " * GAP + "b" and head.text == "A    B"


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("TP2xPP2xDP1", "TP2xPP2"),
        ("TP1xPP3xDP1", "PP3"),
        ("TP1xPP1xDP1", "TP1xPP1xDP1"),
        ("TP10xPP1xDP11", "TP10xDP11"),
    ],
)
def test_a_layout_is_shown_without_the_axes_that_are_one(layout: str, text: str):
    assert short_layout(layout) == text


def test_many_nodes_are_counted_for_people_and_listed_for_programs():
    nodes = [f"node-{number}" for number in range(128)]
    cell = names(nodes)
    assert isinstance(cell, Cell)
    assert cell.shown == "node-0, node-1, node-2, node-3, node-4, node-5 and 122 more"
    assert cell.whole.split(", ") == nodes
    assert names(nodes[:7]) == ", ".join(nodes[:7]), "one more name is no longer than saying so"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 s"),
        (4.4e-5, "0.044 ms"),
        (0.2154, "0.215 s"),
        (-0.4, "-0.4 s"),
        (12.34, "12.3 s"),
        (5_000, "5000 s"),
    ],
)
def test_seconds_read_without_exponents(value: float | None, text: str):
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0 B"), (24_400_000, "24.4 MB"), (999_900_000, "1000 MB"), (5e12, "5 TB"), (2e15, "2000 TB")],
)
def test_bytes_read_without_exponents(value: float | None, text: str):
    assert size(value) == text
