"""The text of a job file: what it may hold, and that no text takes long to read."""

import json
import time

import pytest
import yaml

from agent.protocol.jobfile_check import JobFileError
from service.jobs.job_yaml import DEPTH_MAX, VALUES_MAX, read_fields
from tests.service.fake_agent import JOB

CPU_S_MAX = 1.0
"""On two busy cores; what was read before took up to 40 s of them, in the event loop."""


def doubled(levels: int, how: str) -> str:
    """Each level names the one before twice."""
    names = ["a0: &a0 {x: 1}"]
    for level in range(1, levels):
        before = f"[*a{level - 1}, *a{level - 1}]"
        names.append(f"a{level}: &a{level} " + (f"{{<<: {before}, y{level}: 1}}" if how == "merged" else before))
    return "\n".join(names)


TEXTS = {
    "one hundred thousand lists": "[" * 100_000,
    "one hundred thousand mappings": "{a: " * 100_000,
    "lists in lines": "- " * 100_000,
    "keys of keys": "? " * 100_000,
    "many values": "a: [" + "1, " * 300_000 + "]",
    "many lines": "\n".join(f"k{number}: {number}" for number in range(80_000)),
    "aliases": doubled(40, "listed"),
    "merges": doubled(40, "merged"),
    "one anchor often": "a: &a [" + "x, " * 1_000 + "]\nb: [" + "*a, " * 9_000 + "]",
    "a number to the base of sixty": "a: 1" + ":1" * 400_000,
    "a long integer": "a: " + "1" * 900_000,
    "a long integer in JSON": '{"a": ' + "1" * 900_000 + "}",
    "a list in JSON": '{"a": ' + "[" * 900_000 + "]}",
    "a wide list in JSON": '{"a": [' + "1," * 400_000 + "1]}",
    "spaces": " " * 900_000 + ":",
    "quotes": '"' + "\\x41" * 200_000,
    "anchors": "&a " * 300_000,
    "tags": "!<x> " * 200_000,
    "directives": "%TAG ! tag:x,2000:\n" * 40_000,
    "documents": "---\n" * 200_000,
    "comments": "# x\n" * 200_000 + "a: 1",
    "unfinished": '{"a": "' + "x" * 900_000,
}


@pytest.mark.parametrize("form", [json.dumps, yaml.safe_dump])
def test_a_file_may_have_as_many_values_in_one_form_as_in_the_other(form):
    def fields(numbers: int) -> bytes:
        return form({"a": list(range(numbers)), "b": {"c": None}}).encode()

    fits = VALUES_MAX - 6  # The file, a, its list, b, its mapping, c; null makes it one too many.
    assert read_fields(fields(fits - 1))
    with pytest.raises(JobFileError, match=f"more than {VALUES_MAX} values"):
        read_fields(fields(fits))


@pytest.mark.parametrize("name", TEXTS)
def test_no_text_takes_long_to_read(name):
    text = TEXTS[name].encode()
    began = time.thread_time()
    try:
        read_fields(text)
    except JobFileError as error:
        assert all(len(problem.rule) <= 500 for problem in error.problems)
    assert time.thread_time() - began < CPU_S_MAX


@pytest.mark.parametrize(
    ("text", "field", "rule"),
    [
        ('a: "x\\0y"', "a", "must not contain a NUL character"),
        ('{"a": {"b": ["\\u0000"]}}', "a.b.0", "must not contain a NUL character"),
        ('"x\\0y": 1', "'x\\x00y'", "the name must be text, perhaps in quotes"),
        ('a: "\\ud800"', "(whole)", "invalid Unicode character escape code"),
        ("a: .nan", "a", "must be a finite number"),
        ("a: [1.0, -.inf]", "a.1", "must be a finite number"),
        ("a: 18446744073709551616", "a", "must be a whole number that fits into 64 bits"),
        ("a: {1: x}", "a.1", "the name must be text, perhaps in quotes"),
        ("a: !!binary aGVsbG8=", "(whole)", "a value with the tag !!binary; write it without a tag"),
        *((f"a: {tagged}", "(whole)", "write it without a tag") for tagged in ("!!bool x", "!!int ''", "!!int 010")),
        ("a: !!float " + ":".join("1" * 400), "(whole)", "write it without a tag"),
        *(
            (f"a: {tagged}", "(whole)", f"a value with the tag {tagged.split()[0]}; write it without a tag")
            for tagged in ("!doubtful [3]", "!twice {x: 1}", "!!set {x, y}", "!!omap [x: 1]")
        ),
        ("a: !!map 3", "(whole)", "expected a mapping node, but found scalar"),
        ("a: &a [*a]", "(whole)", "alias *a stands for nothing before it, or for what it is part of"),
        ("a: *b", "(whole)", "alias *b stands for nothing before it, or for what it is part of"),
        ("[" * (DEPTH_MAX + 1), "(whole)", f"more than {DEPTH_MAX} levels"),
        ('{"a": ' * (DEPTH_MAX + 2) + "1" + "}" * (DEPTH_MAX + 2), ".a", f"lies more than {DEPTH_MAX} levels deep"),
        ("a: [" + "1, " * 30_000 + "]", "(whole)", "more than 20000 values"),
        ("a: \xff", "(whole)", "must be YAML or JSON"),
    ],
)
def test_what_no_job_file_needs_is_refused_by_field(text, field, rule):
    content = text.encode("latin-1") if "\xff" in text else text.encode()
    with pytest.raises(JobFileError) as raised:
        read_fields(content)
    (problem,) = raised.value.problems
    assert problem.field.endswith(field)
    assert rule in problem.rule


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *(
            ("1e-4", 1e-4),
            ("1e3", 1000.0),
            ("9E-1", 0.9),
            ("1.5e3", 1500.0),
            (".5", 0.5),
            ("5.", 5.0),
            ("-1e-4", -1e-4),
        ),
        *(("0", 0), ("-7", -7), ("+3", 3), ("0.10", 0.1), ("0o17", 15), ("0x1f", 31), ("true", True), ("False", False)),
        *(("~", None), ("", None), ("null", None), ("2030-01-31", "2030-01-31"), ("1.2.3", "1.2.3"), ("y", "y")),
        *(("2030-1-3 12:00:00", "2030-1-3 12:00:00"), ("1e", "1e"), ("e4", "e4"), ("_1", "_1"), ("'010'", "010")),
        *(('"yes"', "yes"), ("!!str 1e-4", "1e-4"), ("0.5x", "0.5x"), ("10:20:x", "10:20:x")),
        *(("1_a", "1_a"), ("3_x_0", "3_x_0"), ("7:99", "7:99"), ("10.0.0.1", "10.0.0.1")),
    ],
)
def test_a_value_is_what_yaml_1_2_says(written, value):
    read = read_fields(f"a: {{b: {written}}}".encode())
    assert json.dumps(read) == json.dumps({"a": {"b": value}})


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        *((word, f"write true or false, or '{word}' for the text") for word in ("yes", "No", "ON", "off")),
        *((number, f"write it without zeros in front, or '{number}' for the text") for number in ("0123", "-08", "00")),
        *(
            (number, f"write it without _, or '{number}' for the text")
            for number in ("1_000", "1_0.5", "0x1_f", "0b1_0")
        ),
        *((number, f"write a number to the base of ten, or '{number}' for the text") for number in ("12:30", "0b101")),
        *((number, f"write a number to the base of ten, or '{number}' for the text") for number in ("-0x1f", "1:30.5")),
    ],
)
def test_what_yaml_1_1_reads_otherwise_is_refused_by_field(written, instead):
    with pytest.raises(JobFileError) as raised:
        read_fields(f"a: {{b: [{written}]}}".encode())
    (problem,) = raised.value.problems
    assert problem.field == "a.b.0"
    assert problem.rule == f"{written} means different things in YAML 1.1 and 1.2; {instead}"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("seed: 1\nseed: 2\n", "seed"),
        ("a: {b: [{x: 1, 'x': 1}]}", "a.b.0.x"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "a.b"),
        ("base: &base {x: 1}\na: {<<: *base, y: 1, y: 2}", "a.y"),
        ("environment: {A: 1, A: 2}", "environment.A"),
    ],
)
def test_a_name_that_stands_twice_is_refused(text, field):
    with pytest.raises(JobFileError) as raised:
        read_fields(text.encode())
    assert [(each.field, each.rule) for each in raised.value.problems] == [(field, "stands here twice; leave one out")]


def test_a_name_may_stand_over_one_that_is_merged():
    text = b"base: &base {x: 1}\na: &a {<<: *base, x: 2}\nb: {<<: *a, x: 3}\n"
    assert read_fields(text) == {"base": {"x": 1}, "a": {"x": 2}, "b": {"x": 3}}


def test_two_arrows_merge_only_as_a_name_and_are_text_as_a_value():
    text = b"a: {b: <<, c: [<<], <<: {d: 1}}\nenvironment: {V: <<}\n"
    assert read_fields(text) == {"a": {"b": "<<", "c": ["<<"], "d": 1}, "environment": {"V": "<<"}}


def test_both_forms_of_a_job_file_mean_the_same():
    assert read_fields(yaml.safe_dump(JOB).encode()) == read_fields(json.dumps(JOB).encode()) == JOB
    assert read_fields(b"{a: true, b: [1, 2.5, x]}") == {"a": True, "b": [1, 2.5, "x"]}


def test_a_number_that_the_environment_takes_by_an_alias_stays_one_where_it_stands():
    text = b"a: {lr: &lr 0.001}\nb: &b 24\nenvironment: {LR: *lr, B: *b, C: <<}"
    assert read_fields(text) == {
        "a": {"lr": 0.001}, "b": 24, "environment": {"LR": "0.001", "B": "24", "C": "<<"}
    }  # fmt: skip


def test_a_mapping_that_is_the_environment_by_an_alias_keeps_its_numbers_where_it_stands():
    assert read_fields(b"args: &e {N: 24}\nenvironment: *e\n") == {"args": {"N": 24}, "environment": {"N": "24"}}


def test_numbers_in_the_environment_of_a_json_file_are_taken_as_they_are_written():
    text = b'{"seed": 1e3, "environment": {"A": 1.10, "B": 1e3, "C": 7, "D": "x", "E": -0.0, "F": 1e400}}'
    environment = {"A": "1.10", "B": "1e3", "C": "7", "D": "x", "E": "-0.0", "F": "1e400"}
    assert read_fields(text) == {"seed": 1000.0, "environment": environment}
    with pytest.raises(JobFileError, match="must be a finite number"):
        read_fields(b'{"environment": {"A": NaN}}')


def test_what_stands_behind_an_alias_is_read_where_it_is_used():
    fields = read_fields(b"base: &base {x: 1}\na: *base\nb: {<<: *base, y: 2}\nday: 2030-01-31\n")
    assert fields == {"base": {"x": 1}, "a": {"x": 1}, "b": {"x": 1, "y": 2}, "day": "2030-01-31"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"args": {"note": "a\0b"}}, "args.note"),
        ({"environment": {"A": "a\0b"}}, "environment.A"),
        ({"workdir": "/a\0b"}, "workdir"),
        ({"start_from": "/a\0/step-1"}, "start_from"),
        ({"checkpoint": {"path": "/a\0b"}}, "checkpoint.path"),
        ({"args": {"wide": 2**70}}, "args.wide"),
        ({"args": {"deep": eval("[" * 40 + "]" * 40)}}, "args.deep"),
        ({"deadline": "9999-12-31T23:59:59-14:00"}, "deadline"),
        ({"global_batch": "24"}, "global_batch"),
        ({"stop": {"steps": True}}, "stop.steps"),
        ({"seed": 1.0}, "seed"),
    ],
)
def test_a_job_that_cannot_be_stored_or_means_two_things_is_422(client, change, field):
    answer = client.post("/api/v1/jobs", content=json.dumps(JOB | change))
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["field"].startswith(field)
    assert client.get("/api/v1/jobs").json() == []
