"""What a body has and nobody reads is said once, and only so much of it."""

import json

import pytest

from pagedd.daemon.ignored_fields import MAX_NAMES, IgnoredFields


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


def body(*names: str) -> bytes:
    return json.dumps({name: [1, {"deep": 2}] for name in names}).encode()


def test_an_unknown_field_is_said_once_with_the_nearest_that_is_known(caplog: pytest.LogCaptureFixture) -> None:
    ignored = IgnoredFields()
    for _ in range(2):
        ignored.note(body("prompt", "temperatur"), ("prompt", "temperature"))
    ignored.note(body("prompt", "user"), ("prompt", "temperature"))
    assert [record.getMessage() for record in caplog.records] == [
        "a body has the field 'temperatur', which is not known here and ignored; did its client mean temperature?",
        "a body has the field 'user', which is not known here and ignored",
    ]


def test_names_are_bounded_in_number_and_length_and_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    ignored = IgnoredFields()
    ignored.note(body("\n2026 ERROR " + "x" * 1000), ())
    assert "\n" not in caplog.text.rstrip("\n")
    assert len(caplog.records[0].getMessage()) < 150
    ignored.note(body(*map(str, range(2 * MAX_NAMES))), ())
    ignored.note(body("another"), ())
    assert len(caplog.records) == MAX_NAMES


def test_a_name_that_is_no_text_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    IgnoredFields().note(b'{"prompt": "a", "\xff": 1}', ("prompt",))
    assert not caplog.records
