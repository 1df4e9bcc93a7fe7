"""A recorded session comes back as it was, also one that an older pagetop made or that was cut off."""

import gzip
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from pagedd.bench.frames import FakeEngine
from pagedd.client.errors import PageddError
from pagedd.client.protocol import encode
from pagedd.client.questions import Prefixes, RequestText
from pagedd.client.stats_frame import StatsFrame
from pagedd.tui.app import main
from pagedd.tui.recording import DEMO, FORMAT, Recorder, Replay, block_question, read, text_question
from pagedd.tui.state import Link

from .conftest import FakeSource, full_disk, make_app, make_source, screen_text, settled

# Made by the first version that could have recorded: frames without machine, events, fills and ages.
OLD = Path(__file__).with_name("recordings") / "before-events.pagetop"


def record(path: Path, num_frames: int = 4) -> list[StatsFrame]:
    engine = FakeEngine(num_blocks=64, num_requests=3)
    frames = [engine.frame() for _ in range(num_frames)]
    recorder = Recorder(path, started_s=100.0)
    for number, frame in enumerate(frames):
        recorder.write(frame, 100.0 + number / 4)
    recorder.close()
    return frames


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.pagetop"
    frames = record(path)
    records = list(read(path))
    assert [record.message for record in records] == frames
    assert [record.at_s for record in records] == [0.0, 0.25, 0.5, 0.75]


def test_a_file_that_was_cut_off_shows_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.pagetop"
    record(path, num_frames=30)
    data = path.read_bytes()
    for size in (len(data) * 3 // 4, len(data) - 9, len(data) - 1):
        path.write_bytes(data[:size])
        assert 0 < len(list(read(path))) <= 30


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.pagetop"
    path.write_text("mine")
    with pytest.raises(PageddError, match="choose another file"):
        Recorder(path, started_s=0.0)
    assert path.read_text() == "mine"


def test_a_recording_of_an_older_version_still_replays() -> None:
    frames = [record.message for record in read(OLD)]
    assert len(frames) == 5
    assert all(isinstance(frame, StatsFrame) and frame.machine is None and frame.events == [] for frame in frames)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"not gzip", "it is no recording of pagetop"),
        (b"", "it is no recording of pagetop"),
        (gzip.compress(b"PNG\n"), "it is no recording of pagetop"),
        (gzip.compress(b"[]\n"), "it is no recording of pagetop"),
        (gzip.compress(b'{"format": Infinity, "pagedd": "x"}\n'), "it is no recording of pagetop"),
        (gzip.compress(b'{"format": 0, "pagedd": "x"}\n'), "it is no recording of pagetop"),
        (
            gzip.compress(json.dumps({"format": FORMAT + 1, "pagedd": "9.9.9"}).encode() + b"\n"),
            f"format {FORMAT + 1}, written by pagedd 9.9.9; this version reads up to {FORMAT}: update it",
        ),
        (
            gzip.compress(json.dumps({"format": FORMAT, "pagedd": "0.1.0"}).encode() + b"\n" + b"\x07" * 32),
            "the file is damaged",
        ),
        (
            gzip.compress(
                json.dumps({"format": FORMAT, "pagedd": "0.1.0"}).encode() + b"\n\0" + b"\0" * 11 + b"\x01" + b"\xc0"
            ),
            "a message at 0.0 s that this version cannot read",
        ),
    ],
    ids=["no gzip", "empty", "no JSON", "no header", "infinite", "none", "newer", "damaged", "an unknown message"],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "a.pagetop"
    path.write_bytes(content)
    with pytest.raises(PageddError) as error:
        list(read(path))
    assert error.value.code == "invalid_setting"
    assert str(path) in error.value.message
    assert why in error.value.message


def test_the_command_says_why_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", str(tmp_path / "none.pagetop"), "--once"]) == 1
    assert "cannot be read (No such file or directory)" in capsys.readouterr().err


async def test_a_replay_gives_frames_at_its_speed_and_then_says_that_it_is_over(tmp_path: Path) -> None:
    path = tmp_path / "a.pagetop"
    frames = record(path)
    updates = [update async for update in Replay(path, speed=1000).updates()]
    assert updates == [*frames, Link("ended")]


async def test_a_replay_answers_what_was_asked_while_it_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "a.pagetop"
    (frame,) = record(path, num_frames=1)
    recorder = Recorder(tmp_path / "b.pagetop", started_s=0.0)
    recorder.write(frame, 0.0)
    recorder.write(RequestText(id=text_question("r1"), request_id="r1", prompt="Hi"), 0.1)
    recorder.write(Prefixes(id="prefixes", num_blocks=3), 0.1)
    recorder.close()
    replay = Replay(tmp_path / "b.pagetop", speed=1000)
    with pytest.raises(PageddError, match="does not have this"):
        await replay.text("r1")
    async for _ in replay.updates():
        pass
    assert (await replay.text("r1")).prompt == "Hi"
    assert (await replay.prefixes()).num_blocks == 3
    with pytest.raises(PageddError, match="does not have this"):
        await replay.block(7)
    with pytest.raises(PageddError, match="there is no daemon to act on"):
        await replay.cancel("r1")
    assert block_question(7) == "block 7"


def test_the_demo_is_a_recording_of_this_version_and_small() -> None:
    messages = [record.message for record in read(DEMO)]
    frames = [message for message in messages if isinstance(message, StatsFrame)]
    assert len(frames) > 100
    assert all(frame.machine is not None and frame.blocks is not None and frame.blocks.fills for frame in frames)
    assert any(isinstance(message, Prefixes) for message in messages)
    assert any(isinstance(message, RequestText) for message in messages)
    assert DEMO.stat().st_size < 400_000


def written(path: Path, *times_s: float) -> Path:
    """A recording with a frame at each of these times, as a damaged one may have them."""
    recorder = Recorder(path, started_s=0.0)
    for at_s in times_s:
        payload = encode(FakeEngine(num_blocks=64, num_requests=3).frame())
        recorder._file.write(struct.pack(">BdI", 0, at_s, len(payload)) + payload)
    recorder.close()
    return path


@pytest.mark.parametrize("times_s", [(math.inf,), (math.nan,), (-1.0,), (0.0, 2.0, 1.0)])
def test_a_time_that_cannot_be_is_a_damaged_file(tmp_path: Path, times_s: tuple[float, ...]) -> None:
    with pytest.raises(PageddError, match="the file is damaged"):
        list(read(written(tmp_path / "a.pagetop", *times_s)))


async def test_a_long_silence_is_shown_as_a_shorter_one(tmp_path: Path) -> None:
    replay = Replay(written(tmp_path / "a.pagetop", 0.0, 1e18, 1e18), speed=1000)
    assert len([update async for update in replay.updates()]) == 4


def test_without_a_picture_there_is_nothing_to_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "a.pagetop")
    assert main(["--once", "--replay", str(path)]) == 1
    assert "it ends before the first picture" in capsys.readouterr().err


def test_a_pipe_is_no_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    assert main(["--once", "--replay", str(path)]) == 1
    assert "it is no file" in capsys.readouterr().err


async def test_a_session_is_recorded_and_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = FakeEngine()
    source = FakeSource([engine.frame()])
    app = make_app(source)
    async with app.run_test(size=(120, 38), notifications=True) as pilot:
        await settled(pilot)
        await pilot.press("r")
        await settled(pilot)
        assert "◉ recording" in screen_text(app)
        source.say(engine.frame())
        await pilot.press("enter")
        await settled(pilot)
        await pilot.press("escape", "r")
        await settled(pilot)
    (file,) = list(tmp_path.iterdir())  # noqa: ASYNC240 (the application has ended)
    kinds = [type(record.message).__name__ for record in read(file)]
    assert kinds.count("StatsFrame") == 2
    assert "RequestText" in kinds


async def test_a_recording_that_is_damaged_says_where_it_ends_and_stays() -> None:
    source = make_source()
    app = make_app(source)
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        source.say(Link("ended", "a.pagetop: the file is damaged"))
        await settled(pilot)
        assert "nothing after this can be shown. a.pagetop: the file is damaged" in screen_text(app)
        assert "Requests (" in screen_text(app)


async def test_a_recording_that_a_full_disk_ends_is_said(tmp_path: Path) -> None:
    source = make_source()
    app = make_app(source)
    async with app.run_test(size=(160, 48)) as pilot:
        await settled(pilot)
        app.session.start_recording(tmp_path / "a.pagetop")
        source.say(FakeEngine().frame())
        await settled(pilot)
        assert "◉ recording" in screen_text(app)
        with full_disk(100):
            await pilot.press("r")
            await settled(pilot)
        assert "the recording has ended (File too large)" in screen_text(app)
        assert "◉ recording" not in screen_text(app)


def test_once_on_a_full_disk_shows_the_picture_and_says_what_became_of_the_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with full_disk(100):
        assert main(["--once", "--demo", "--speed", "1000", "--record", str(tmp_path / "a.pagetop")]) == 1
    captured = capsys.readouterr()
    assert "fragmentation" in captured.out
    assert captured.err == (
        f"pagetop: invalid_setting: {tmp_path}/a.pagetop: the recording has ended (File too large);"
        " choose another place\n"
    )


def test_a_recording_that_cannot_be_made_is_said_before_there_is_a_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pagedd.tui.app.why_no_screen", lambda _: "")
    assert main(["--demo", "--record", "/nowhere/a.pagetop"]) == 1
    assert "/nowhere/a.pagetop: cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize("output", [">/dev/full", ">&-"])
def test_an_output_that_takes_nothing_is_said_in_a_line(output: str) -> None:
    command = f"exec {sys.executable} -P -m pagedd.tui.app --once --demo --speed 1000 {output}"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("pagetop: invalid_setting: standard output ")


@pytest.mark.parametrize("speed", ["0", "1e-300", "nan", "1e9"])
def test_a_speed_at_which_nothing_would_be_seen_is_refused(speed: str) -> None:
    with pytest.raises(SystemExit):
        main(["--once", "--demo", "--speed", speed])
