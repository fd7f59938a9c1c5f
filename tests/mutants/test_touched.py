"""A change reaches the tests of what imports it, starts it as a program or names it, and no others."""

from tests.touched import reached_tests


def test_a_change_reaches_what_imports_it_the_nearest_first() -> None:
    far = reached_tests(["service/ledger/rules.py"])
    assert far["tests/service/ledger/test_rules.py"] == 1 < far["tests/service/console/test_pages.py"]
    assert "tests/liver_core/layout/test_boxes.py" not in far


def test_what_is_started_as_a_program_counts_as_imported() -> None:
    assert "tests/liver_core/device/test_on_fake_cuda.py" in reached_tests(["tests/liver_core/device/fake_cuda.py"])


def test_the_browsers_half_of_the_console_reaches_the_tests_in_a_browser() -> None:
    assert set(reached_tests(["service/console/web/src/main.tsx"])) == {
        f"tests/e2e/test_{name}.py" for name in ("console", "real_ranks", "scale")
    }
