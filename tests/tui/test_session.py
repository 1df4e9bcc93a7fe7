"""What is recorded, what is drawn of it, and when it looks alive."""

import asyncio
from pathlib import Path

import pytest

from pagedd.bench.frames import FakeEngine
from pagedd.client.errors import PageddError
from pagedd.client.stats_frame import StatsFrame
from pagedd.tui.recording import Recorder, Replay, read
from pagedd.tui.session import Session
from pagedd.tui.state import GREY_S, Link

from .conftest import FakeSource, full_disk


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def some_frames(number: int) -> list[StatsFrame]:
    engine = FakeEngine(num_blocks=64, num_requests=3)
    return [engine.frame() for _ in range(number)]


def drawn(session: Session, clock: Clock, frames: list[StatsFrame]) -> list[int]:
    """The numbers of the frames that make another picture, when four come a second."""
    found = []
    for frame in frames:
        if session.take(frame):
            found.append(frame.seq)
        clock.now_s += 0.25
    return found


async def test_what_is_recorded_is_every_frame_and_all_are_drawn(tmp_path: Path) -> None:
    clock, source, frames = Clock(), FakeSource([]), some_frames(4)
    session = Session(source, clock=clock)
    session.start_recording(tmp_path / "all.pagetop")
    assert source.gives_every_frame
    assert drawn(session, clock, frames) == [1, 2, 3, 4]
    session.stop_recording()
    assert not source.gives_every_frame
    assert [record.message for record in read(tmp_path / "all.pagetop")] == frames


async def test_first_words_are_recorded_although_frames_lack_them(tmp_path: Path) -> None:
    session = Session(FakeSource([]), clock=Clock())
    session.start_recording(tmp_path / "all.pagetop")
    (frame,) = some_frames(1)
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
    (frame,) = some_frames(1)
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
    clock, frames = Clock(), some_frames(6)
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


async def test_a_picture_is_as_old_as_its_daemon_said_it_would_be_before_it_looks_dead() -> None:
    clock = Clock()
    session = Session(FakeSource([]), clock=clock)
    (frame,) = some_frames(1)
    frame.interval_s = 2.0
    session.take(frame)
    clock.now_s += 1.9 + GREY_S
    assert not session.is_stale
    clock.now_s += 0.2
    assert session.is_stale


async def test_a_full_disk_ends_the_recording_with_the_reason_and_watching_goes_on(tmp_path: Path) -> None:
    clock, source, frames = Clock(), FakeSource([]), some_frames(12)
    session = Session(source, clock=clock)
    path = session.start_recording(tmp_path / "all.pagetop")
    with full_disk(1000):
        assert drawn(session, clock, frames) == list(range(1, 13))
    assert not session.modes.is_recording
    assert not source.gives_every_frame
    fault = session.take_fault()
    assert fault is not None
    assert fault.message == f"{path}: the recording has ended (File too large); choose another place"
    assert session.take_fault() is None
    assert session.stop_recording() is None


async def test_a_disk_that_is_full_at_the_end_is_said_and_the_next_recording_begins(tmp_path: Path) -> None:
    session = Session(FakeSource([]), clock=Clock())
    session.start_recording(tmp_path / "a.pagetop")
    session.take(some_frames(1)[0])
    with full_disk(100), pytest.raises(PageddError, match=r"a\.pagetop: the recording has ended"):
        session.stop_recording()
    session.start_recording(tmp_path / "b.pagetop")
    with full_disk(100):
        await session.close()
    assert "b.pagetop" in str(session.take_fault())


async def test_a_recording_that_is_damaged_ends_the_picture_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.pagetop"
    recorder = Recorder(path, started_s=0.0)
    recorder.write(some_frames(1)[0], 0.0)
    recorder.write(some_frames(1)[0], -1.0)
    recorder._file.write(b"\x09" * 13)
    recorder.close()
    session = Session(Replay(path, speed=1000))
    await session.watch(lambda: None)
    assert session.state.frame is not None
    assert session.state.link.state == "ended"
    assert "a record of kind 9" in session.state.link.error
