"""Whatever a frame says, nothing of it steers the terminal and nothing of it ends pagetop."""

import math
import unicodedata
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pagedd.bench.frames import FakeEngine
from pagedd.client.errors import PageddError
from pagedd.client.questions import BlockDetail, Prefixes, PrefixNode
from pagedd.client.stats_frame import BlockMap, Device, Event, Machine, StatsFrame
from pagedd.tui.glyphs import UNICODE
from pagedd.tui.line import text_of, width_of
from pagedd.tui.once import once_lines
from pagedd.tui.renderables.header import Modes
from pagedd.tui.sense import nonsense
from pagedd.tui.session import Session
from pagedd.tui.state import State

from .conftest import NOW_S, FakeSource, make_app, screen_text, settled

# Clears the screen, two ways; other lines, four ways; turned round, combining, wide, joined, markup, half of a pair.
WORDS = "\x1b[2J\x9b2J\r\n\x0b\u2028\u2029\u202eabc\u0301\u0301日本👩\u200d👩[bold]]8;;\x07\ud800"
NUMBERS = [-1, 0, 10**15]
FLOATS = [math.nan, math.inf, -math.inf, -1.0, 1e300]
KEYS = ["1", "2", "3", "4", "5", "question_mark", "enter"]


def spoiled(value: Any, at: int) -> Any:
    """The same message with every text, and every number that is no index, replaced."""
    if isinstance(value, msgspec.Struct):
        fields = {name: spoiled(getattr(value, name), at) for name in value.__struct_fields__}
        return type(value)(**fields)
    if isinstance(value, dict):
        return {name: spoiled(item, at + index) for index, (name, item) in enumerate(value.items())}
    if isinstance(value, list):
        return [spoiled(item, at) for item in value]
    if isinstance(value, tuple):
        return tuple(spoiled(item, at) for item in value)
    if isinstance(value, str):
        return WORDS
    if isinstance(value, float):
        return FLOATS[at % len(FLOATS)] if at % 2 else value
    if isinstance(value, int):
        return NUMBERS[at % len(NUMBERS)]
    return value


def hostile_frame(at: int) -> StatsFrame:
    frame = FakeEngine(num_blocks=64, num_requests=3).frame()
    frame.machine = Machine(
        cpu_percent=1.0,
        memory_used_bytes=1.0,
        memory_total_bytes=1.0,
        temperature_c=1.0,
        num_cores=1,
        devices=[Device(index=0, name="x", others=[("x", 1.0)]) for _ in range(at % 3)],
    )
    frame.events = [Event(seq=at, time_s=0.0, kind="x", reason="x", request_id="x")]
    wrong = spoiled(frame, at)
    for number, row in enumerate(wrong.requests):
        row.request_id += str(number)
        row.block_table = [0, 10**9, 3, 3]
        row.num_blocks = 4
    wrong.blocks = [
        frame.blocks,
        None,
        BlockMap(block_size=0, states=b"", ref_counts=b""),
        BlockMap(block_size=-1, states=b"\x02\x01\xff", ref_counts=b"\x00"),
        BlockMap(block_size=16, states=bytes(64), ref_counts=bytes(3), fills=b"\xff", ages=b"\xff"),
    ][at % 5]
    return wrong


def control_characters(text: str) -> set[str]:
    return {char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and char != "\n"}


class HostileSource(FakeSource):
    async def prefixes(self) -> Any:
        answer = await super().prefixes()
        answer.nodes = [
            PrefixNode(digest=WORDS, parent=WORDS, depth=-1, num_tokens=-1, num_blocks=-1, age_s=math.nan, text=WORDS),
            *answer.nodes,
        ]
        return answer

    async def text(self, request_id: str) -> Any:
        answer = await super().text(request_id)
        answer.prompt, answer.outputs = WORDS, [WORDS, ""]
        return answer

    async def block(self, index: int) -> Any:
        return spoiled(await super().block(index), 1)


@pytest.mark.parametrize("at", range(5))
async def test_a_frame_full_of_nonsense_is_shown_as_far_as_it_can_be(at: int) -> None:
    source = HostileSource([hostile_frame(at), hostile_frame(at)])
    app = make_app(source)
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        for key in KEYS:
            await pilot.press(key)
            source.say(hostile_frame(at + 1))
            await settled(pilot)
            text = screen_text(app)
            assert "pagetop" in text
            assert not control_characters(text)


@pytest.mark.parametrize("at", range(5))
async def test_the_same_frame_as_text_steers_nothing(at: int) -> None:
    session = Session(FakeSource([]), clock=lambda: NOW_S)
    for _ in range(2):
        session.take(hostile_frame(at))
    state = session.state
    for line in once_lines(state, Modes(), 100, UNICODE):
        assert not control_characters(line)
        assert width_of([(line, "")]) <= 100
        assert text_of([(line, "")]) == line


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("where", ["time_s", "uptime_s", "age_s", "figure", "temperature_c"])
async def test_a_number_that_is_none_is_said_and_not_shown(value: float, where: str) -> None:
    frame = FakeEngine().frame()
    match where:
        case "time_s" | "uptime_s":
            setattr(frame, where, value)
        case "age_s":
            frame.requests[0].age_s = value
        case "figure":
            frame.figures["slot_fill"] = value
        case _:
            frame.machine = Machine(temperature_c=value)
    session = Session(FakeSource([]), clock=lambda: NOW_S)
    session.take(FakeEngine().frame())
    session.take(frame)
    assert session.state.link.state == "lost"
    assert "makes no sense" in session.state.events[-1].reason


def test_words_of_a_daemon_are_shown_without_what_would_steer_the_terminal() -> None:
    frame = FakeEngine(num_blocks=64, num_requests=3).frame()
    frame.model = frame.device = WORDS
    for row in frame.requests:
        row.user = row.model = row.preview = row.state = WORDS
    state = State()
    state.take(frame, NOW_S)
    lines = once_lines(state, Modes(), 200, UNICODE)
    assert "日本" in "".join(lines)
    assert not [line for line in lines if control_characters(line)]


def floats_of(message: Any) -> Iterator[tuple[Any, str]]:
    """Everything in a message that holds a float, and the name that it has there."""
    for field in msgspec.structs.fields(message):
        value = getattr(message, field.name)
        if field.type in (float, float | None):
            yield message, field.name
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, msgspec.Struct):
                yield from floats_of(item)


def full_message(kind: type[Any]) -> Any:
    if kind is BlockDetail:
        return BlockDetail(id="", index=0, state="used", last_use_s=1.0)
    if kind is Prefixes:
        return Prefixes(id="", nodes=FakeEngine().prefixes())
    frame = FakeEngine(num_blocks=64, num_requests=3).frame()
    frame.machine = Machine(devices=[Device(index=0)])
    frame.events = [Event(seq=1, time_s=0.0, kind="x", reason="x")]
    return frame


@pytest.mark.parametrize("kind", [StatsFrame, BlockDetail, Prefixes])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_every_number_of_a_message_is_looked_at(kind: type[Any], value: float) -> None:
    message = full_message(kind)
    assert nonsense(message) is None
    places = list(floats_of(message))
    assert places
    for holder, name in places:
        before = getattr(holder, name)
        setattr(holder, name, value)
        assert name in str(nonsense(message))
        setattr(holder, name, before)


@pytest.mark.parametrize("interval_s", [0.0, -1.0, 60.0])
def test_a_picture_that_could_never_be_late_is_refused(interval_s: float) -> None:
    frame = FakeEngine().frame()
    frame.interval_s = interval_s
    assert nonsense(frame) == f"interval_s is {interval_s}"


async def test_an_answer_that_makes_no_sense_is_refused_with_the_reason() -> None:
    source = FakeSource([])
    answer = BlockDetail(id="", index=0, state="cached", last_use_s=math.inf)

    async def block(index: int) -> BlockDetail:
        return answer

    source.block = block  # type: ignore[method-assign]
    with pytest.raises(PageddError, match="an answer that makes no sense: last_use_s is inf"):
        await Session(source, clock=lambda: NOW_S).block(0)


@pytest.mark.parametrize("width", [1, 5, 12])
def test_text_is_no_wider_than_what_it_is_for(width: int) -> None:
    state = State()
    state.take(FakeEngine(num_blocks=64, num_requests=3).frame(), NOW_S)
    assert all(width_of([(line, "")]) <= width for line in once_lines(state, Modes(), width, UNICODE))
