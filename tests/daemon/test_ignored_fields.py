"""What a body has and nobody reads is said once, and only so much of it."""

import json

import pytest

from pagedd.daemon.ignored_fields import MAX_CALLERS, MAX_NAMES, IgnoredFields


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


def body(*names: str) -> bytes:
    return json.dumps({name: [1, {"deep": 2}] for name in names}).encode()


def test_an_unknown_field_is_said_once_with_the_nearest_that_is_known(caplog: pytest.LogCaptureFixture) -> None:
    ignored = IgnoredFields()
    for _ in range(2):
        ignored.note(body("prompt", "temperatur"), ("prompt", "temperature"), "uid:1")
    ignored.note(body("prompt", "temperatur", "user"), ("prompt", "temperature"), "uid:2")
    assert [record.getMessage() for record in caplog.records] == [
        "a body has the field 'temperatur', which is not known here and ignored; did its client mean temperature?",
        "a body has the field 'user', which is not known here and ignored",
    ]


@pytest.mark.parametrize(
    "name", ["", "my key is sk-1", "\n2026 ERROR x", "x" * 41, "5", "\u00e9t\u00e9", "a\tb", "<b>", "\u202eabc"]
)
def test_what_does_not_look_like_a_name_may_be_a_text_and_is_not_said(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    IgnoredFields().note(body(name, "named"), (), "uid:1")
    assert [record.getMessage() for record in caplog.records] == [
        "a body has the field 'named', which is not known here and ignored"
    ]


def test_one_caller_s_names_are_bounded_and_leave_those_of_others_to_be_said(caplog: pytest.LogCaptureFixture) -> None:
    ignored = IgnoredFields()
    for number in range(2):
        ignored.note(body(*(f"a{number}_{index}" for index in range(MAX_NAMES))), (), "uid:1")
    assert len(caplog.records) == MAX_NAMES
    ignored.note(body("another"), (), "uid:1")
    ignored.note(body("temperatur"), (), "uid:2")
    assert len(caplog.records) == MAX_NAMES + 1
    for number in range(2 * MAX_CALLERS):
        ignored.note(body(f"b{number}"), (), f"key:{number}")
    assert len(caplog.records) == MAX_NAMES + 1 + MAX_CALLERS - 2


def test_a_name_that_is_no_text_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    IgnoredFields().note(b'{"prompt": "a", "\xff": 1}', ("prompt",), "uid:1")
    assert not caplog.records
