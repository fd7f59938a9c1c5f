"""The one codec: strict, bounded, and every error names field and rule."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from liver_core.layout import MessageError, decode, from_json, to_json
from liver_core.layout.limits import STRICT, Bound, Count, Identifier, Seconds, Text, UtcSeconds, fitting, listed


@dataclass(frozen=True, slots=True)
class Inner:
    number: Count = 0
    text: Text = ""

    def __post_init__(self) -> None:
        if self.number == 13:
            raise MessageError("number", "must not be 13")


@dataclass(frozen=True, slots=True)
class Named:
    __pydantic_config__ = STRICT

    name: Identifier


@dataclass(frozen=True, slots=True)
class Outer:
    __pydantic_config__ = STRICT

    named: Named | None = None
    inner: Annotated[tuple[Inner, ...], Bound(max_length=2)] = ()
    name: Identifier = "a"
    seconds: Seconds = 0.0
    at_utc: UtcSeconds = 1e9
    pair: Annotated[tuple[Count, ...], Bound(min_length=2)] = (1, 2)
    code: Annotated[str, Bound(min_length=3)] = "abc"


def test_what_is_written_is_read_as_the_same():
    value = Outer(Named("b"), (Inner(2**53 - 1, "ü"), Inner()), "n-1", 0.1, 1.7e9)
    assert from_json(Outer, to_json(value)) == value


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"seconds": float("nan")}, "seconds: must be a finite number, is nan"),
        ({"seconds": float("inf")}, "seconds: must be a finite number, is inf"),
        ({"seconds": 1e10}, "seconds: must be at most 1000000000, is 10000000000.0"),
        ({"seconds": "1"}, "seconds: must be a valid number, is '1'"),
        ({"at_utc": 12.0}, "at_utc: must be at least 946684800, is 12.0"),
        ({"at_utc": 1.7e12}, "at_utc: must be at most 4102444800, is 1700000000000.0"),
        ({"inner": [{"number": 2**53}]}, "inner[0].number: must be at most 9007199254740991, is 9007199254740992"),
        ({"inner": [{}, {"number": True}]}, "inner[1].number: must be a valid integer, is True"),
        ({"inner": [{}, {"text": "a\0b"}]}, "inner[1].text: must not contain a NUL character"),
        ({"inner": [{"text": "x" * 2_001}]}, "inner[0].text: must have at most 2000 characters, has 2001"),
        ({"inner": [{"number": 13}]}, "inner[0].number: must not be 13"),
        ({"inner": [{"nunber": 1}]}, "inner[0].nunber: is not a field of this message"),
        ({"inner": [{}, {}, {}]}, "inner: must have at most 2 items, has 3"),
        ({"inner": {}}, "inner: must be a valid array, is an object"),
        ({"named": {}}, "named.name: is required"),
        ({"name": ""}, "name: must not be empty"),
        ({"name": None}, "name: must be a valid string, is None"),
        ({"name": {"a": 1}}, "name: must be a valid string, is an object"),
        ({"seconds": "9" * 500}, f"seconds: must be a valid number, is '{'9' * 79}"),
        ({"pair": [1]}, "pair: must have at least 2 items, has 1"),
        ({"code": "ab"}, "code: must have at least 3 characters, has 2"),
        ([], "message: must be an object, is a list"),
    ],
)
def test_what_is_wrong_is_named_by_field_and_rule(data: object, complaint: str):
    with pytest.raises(MessageError) as error:
        from_json(Outer, data)
    assert str(error.value) == complaint


def test_what_is_no_json_is_refused():
    with pytest.raises(MessageError, match=r"^message: Invalid JSON"):
        decode(Outer, b'{"name": ')


def test_a_text_is_made_to_fit_by_cutting_it_and_by_showing_where_a_nul_was():
    assert fitting("a\ud800b\N{GRINNING FACE}").encode() == "a\N{REPLACEMENT CHARACTER}b\N{GRINNING FACE}".encode()
    assert fitting("a\0b" * 2, 5) == "a\N{REPLACEMENT CHARACTER}ba\N{REPLACEMENT CHARACTER}"


def test_of_many_names_the_first_are_listed_and_the_others_are_counted():
    assert [listed(iter("abc"), most) for most in (2, 3, 4)] == ["a, b and 1 more", "a, b, c", "a, b, c"]
