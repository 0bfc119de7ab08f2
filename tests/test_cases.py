"""for_each: one test for a table, which loses no case."""

from pathlib import Path

import pytest
from support.cases import for_each


@for_each("number, square", [(2, 4), (3, 9)])
def test_each_case_is_called_by_name(number: int, square: int) -> None:
    assert number**2 == square


@for_each("name", ["a", "b"])
def test_each_case_has_a_folder_of_its_own(name: str, tmp_path: Path) -> None:
    assert not list(tmp_path.iterdir())
    (tmp_path / name).touch()


def test_one_failure_names_every_case_that_is_wrong() -> None:
    called = []

    @for_each("number", [1, 2, 3, 4])
    def check(number: int) -> None:
        called.append(number)
        assert number % 2 == 0, "odd"

    with pytest.raises(pytest.fail.Exception) as failed:
        check()
    assert called == [1, 2, 3, 4]
    first, *cases = str(failed.value).splitlines()
    assert first == "2 of 4 cases fail"
    lines = [line for line in cases if "test_cases.py" in line]
    assert [line.split(":")[0] for line in lines] == ["1", "3"]
    assert all("AssertionError: odd" in line for line in lines)


def test_an_expected_error_that_does_not_come_is_a_failed_case() -> None:
    @for_each("text", ["1", "one"], ids=["digits", "letters"])
    def check(text: str) -> None:
        with pytest.raises(ValueError):
            int(text)

    with pytest.raises(pytest.fail.Exception, match="1 of 2 cases fail\ndigits: "):
        check()


def test_another_error_is_raised_with_its_case() -> None:
    @for_each("number", [1, 0])
    def check(number: int) -> None:
        assert 1 / number

    with pytest.raises(ZeroDivisionError) as raised:
        check()
    assert raised.value.__notes__ == ["in case 0"]


def test_a_table_that_is_read_from_absent_files_is_skipped_unless_they_are_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @for_each("file", [])
    def check(file: str) -> None:
        raise AssertionError(file)

    monkeypatch.setenv("STEPSPLIT_REQUIRE", "")
    with pytest.raises(pytest.skip.Exception, match="the files of check are not beside"):
        check()
    monkeypatch.setenv("STEPSPLIT_REQUIRE", "chromium,traces")
    with pytest.raises(pytest.fail.Exception, match="traces is required here"):
        check()
