"""Whatever a terminal sends, in whatever pieces, the next key is heard."""

import random
from itertools import count

import pytest
from textual.events import Key, Paste
from textual.message import Message

from pagedd.tui.keyboard import Keyboard

PASTE = b"\x1b[200~"


def keys(messages: list[Message]) -> list[str]:
    return [message.key for message in messages if isinstance(message, Key)]


def typed(keyboard: Keyboard, *pieces: bytes) -> list[str]:
    """The keys that are heard, each piece being what one read gives."""
    return [key for piece in pieces for key in keys(list(keyboard.feed(piece)))]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the parser looks, a second has gone by."""
    seconds = count()
    monkeypatch.setattr("textual._parser.get_time", lambda: float(next(seconds)))


def test_a_character_in_two_pieces_is_one() -> None:
    assert typed(Keyboard(), b"\xc3", b"\xa9", b"\xe6\x97", b"\xa5q") == ["é", "日", "q"]


def test_half_a_character_that_nothing_follows_costs_no_other() -> None:
    assert typed(Keyboard(), b"\xc3", b"q")[-1:] == ["q"]


@pytest.mark.parametrize(
    "sequence",
    [b"\x1b[99999999999;1u", b"\x1b[:::;::;:u", b"\x1b[:u", b"\x1b[:201~", b"\x1b[1:200~", b"\x1b[8982201~"],
)
def test_a_sequence_that_cannot_be_read_costs_no_key_after_it(sequence: bytes) -> None:
    keyboard = Keyboard()
    assert typed(keyboard, b"j" + sequence)[:1] == ["j"]
    keys(list(keyboard.rest()))
    assert typed(keyboard, b"q") == ["q"]


def test_the_mouse_is_read_in_pixels_also_after_a_fault() -> None:
    keyboard = Keyboard()
    list(keyboard.feed(b"\x1b[48;30;120;600;1200t"))
    (before,) = keyboard.feed(b"\x1b[<35;101;41M")
    list(keyboard.feed(b"\x1b[99999999999;1u"))
    (after,) = keyboard.feed(b"\x1b[<35;101;41M")
    assert (before.x, before.y) == (after.x, after.y) == (10, 2)  # type: ignore[attr-defined]


def test_an_escape_that_nothing_follows_is_the_key() -> None:
    keyboard = Keyboard()
    assert typed(keyboard, b"\x1b") == []
    assert keys(list(keyboard.rest())) == ["escape"]


def test_a_paste_whose_end_was_lost_ends_by_itself() -> None:
    keyboard = Keyboard()
    assert typed(keyboard, PASTE + b"kyq", b"q") == []
    (paste,) = keyboard.end_paste()
    assert isinstance(paste, Paste)
    assert paste.text == "kyqq"
    assert typed(keyboard, b"q") == ["q"]


def test_ending_a_paste_that_there_is_not_changes_nothing() -> None:
    keyboard = Keyboard()
    assert list(keyboard.end_paste()) == []
    assert typed(keyboard, b"q") == ["q"]


@pytest.mark.parametrize("leave", [b"\x03", b"\x1b[99;5u"])
@pytest.mark.parametrize("before", [b"", b"j" * 1000, PASTE + b"abc", b"\xc3", b"\x1b[<35;10"])
def test_ctrl_c_is_heard_before_everything_else(leave: bytes, before: bytes) -> None:
    assert typed(Keyboard(), before + leave) == ["ctrl+c"]
    assert typed(Keyboard(), before, leave)[-1] == "ctrl+c"


def test_a_key_is_heard_after_any_bytes() -> None:
    chance = random.Random(1)
    pieces = [
        b"\x1b",
        b"[",
        b"<",
        b";",
        b":",
        b"~",
        b"u",
        b"M",
        b"t",
        b"?",
        b"$y",
        b"200~",
        b"\xff",
        b"\xe6\x97",
        b"\0",
    ]
    for _ in range(500):
        keyboard = Keyboard()
        for _ in range(chance.randrange(1, 8)):
            some = chance.choices([*pieces, *(str(number).encode() for number in range(10))], k=chance.randrange(1, 8))
            list(keyboard.feed(b"".join(some)))
        list(keyboard.rest())
        list(keyboard.end_paste())
        assert typed(keyboard, b"\n", b"q")[-1] == "q"
