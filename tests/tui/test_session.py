"""What is recorded, and what is drawn of it, while there is no time for both."""

import asyncio
from pathlib import Path

from pagedd.bench.frames import FakeEngine
from pagedd.client.stats_frame import StatsFrame
from pagedd.tui.feed import Pace
from pagedd.tui.recording import read
from pagedd.tui.session import Session
from pagedd.tui.state import Link

from .conftest import FakeSource


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def crowded_frames(number: int) -> list[StatsFrame]:
    engine = FakeEngine(num_blocks=64, num_requests=3)
    frames = [engine.frame() for _ in range(number)]
    for frame in frames:
        assert frame.machine is not None
        frame.machine.cpu_percent = 100.0
    return frames


def drawn(session: Session, clock: Clock, frames: list[StatsFrame]) -> list[int]:
    """The numbers of the frames that make another picture, when four come a second."""
    found = []
    for frame in frames:
        if session.take(frame):
            found.append(frame.seq)
        clock.now_s += 0.25
    return found


async def test_a_crowded_machine_thins_what_is_drawn_and_never_what_is_recorded(tmp_path: Path) -> None:
    clock, source, frames = Clock(), FakeSource([]), crowded_frames(12)
    session = Session(source, clock=clock)
    source.pace = Pace(lambda: clock.now_s / 1000)  # a thousandth of a core
    session.start_recording(tmp_path / "all.pagetop")
    assert source.gives_every_frame
    assert drawn(session, clock, frames) == [1, 5, 9]
    session.stop_recording()
    assert not source.gives_every_frame, "the source rests again"
    assert [record.message for record in read(tmp_path / "all.pagetop")] == frames


async def test_a_machine_with_room_is_drawn_frame_by_frame_while_it_is_recorded(tmp_path: Path) -> None:
    clock = Clock()
    session = Session(FakeSource([]), clock=clock)
    session.start_recording(tmp_path / "all.pagetop")
    engine = FakeEngine(num_blocks=64, num_requests=3)
    assert drawn(session, clock, [engine.frame() for _ in range(4)]) == [1, 2, 3, 4]


async def test_first_words_are_recorded_although_frames_lack_them(tmp_path: Path) -> None:
    session = Session(FakeSource([]), clock=Clock())
    session.start_recording(tmp_path / "all.pagetop")
    (frame,) = crowded_frames(1)
    for row in frame.requests:
        row.preview = ""
        session.state.previews[row.request_id] = "Tell me"
    session.take(frame)
    session.stop_recording()
    (record,) = read(tmp_path / "all.pagetop")
    assert isinstance(record.message, StatsFrame)
    assert [row.preview for row in record.message.requests] == ["Tell me"] * len(frame.requests)


async def test_first_words_do_not_wait_for_the_next_frame() -> None:
    source = FakeSource([])
    (frame,) = crowded_frames(1)
    request_id = frame.requests[0].request_id
    frame.requests[0].preview = ""

    async def previews() -> dict[str, str]:
        return {request_id: "Tell me"}

    source.previews = previews  # type: ignore[method-assign]
    session = Session(source, clock=Clock())
    session.take(frame)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert session.state.sequences[0].row.preview == "Tell me"


async def test_a_paused_picture_is_recorded_on_and_knows_that_the_daemon_is_back(tmp_path: Path) -> None:
    clock, frames = Clock(), crowded_frames(6)
    session = Session(FakeSource([]), clock=clock)
    session.take(frames[0])
    session.toggle_pause()
    session.start_recording(tmp_path / "all.pagetop")
    session.take(Link("lost", "gone"))
    assert session.is_stale
    assert drawn(session, clock, frames[1:]) == []
    assert session.state.link.state == "live"
    assert not session.is_stale, "it is old on purpose"
    session.stop_recording()
    assert [record.message for record in read(tmp_path / "all.pagetop")] == frames


def test_a_recorded_session_does_not_grow_old() -> None:
    clock = Clock()
    source = FakeSource([])
    source.name = "replay x"
    session = Session(source, clock=clock)
    session.take(FakeEngine().frame())
    clock.now_s += 60
    assert not session.is_stale
