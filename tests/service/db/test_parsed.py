"""Objects made from stored JSON: made again exactly when the JSON differs, and bounded."""

from service.db.parsed import Parsed


def test_the_same_json_is_parsed_once_and_other_json_at_once():
    made: list[list[int]] = []
    parsed = Parsed(lambda stored: made.append(stored) or tuple(stored), most=2)
    assert parsed.of("job", [1, 2]) is parsed.of("job", [1, 2])
    assert parsed.of("job", [1]) == (1,)
    assert parsed.of("job", [1, 2]) == (1, 2), "back again, as after a rollback"
    assert made == [[1, 2], [1], [1, 2]]


def test_no_more_than_so_many_are_kept():
    made: list[str] = []
    parsed = Parsed(lambda stored: made.append(stored) or stored, most=2)
    for key in "abcb":
        parsed.of(key, key)
    assert made == ["a", "b", "c"]
    parsed.of("a", "a")
    assert made == ["a", "b", "c", "a"]
