"""What `pagectl` shows of a daemon, drawn for people and as JSON for scripts."""

import json
import signal
import subprocess
import threading

import pytest

from pagedd.client.questions import GetPrefixes
from pagedd.client.stats_frame import Event

from .fake_daemon import FakeDaemon
from .pagectl_calls import Run, Start


def test_ps_and_blocks_draw_the_frame(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ps") == 0
    out, err = capsys.readouterr()
    assert out.startswith("map  id  who")
    assert "a    r1  ana     0  decode" in out
    assert err.startswith("tiny · cpu"), "about the daemon, which a pipe is not asked for"
    assert run("blocks") == 0
    assert "0000 aS·▒b▒··" in capsys.readouterr().out


def test_ps_and_blocks_are_json_for_scripts(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ps", "--json") == 0
    assert [row["request_id"] for row in json.loads(capsys.readouterr().out)] == ["r1", "r2", "r3"]
    assert run("blocks", "--json") == 0
    assert json.loads(capsys.readouterr().out)["block_size"] == 4


def test_stats_are_text_or_json(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stats") == 0
    assert "kv_usage              50.0  %" in capsys.readouterr().out
    assert run("stats", "--json") == 0
    frame = json.loads(capsys.readouterr().out)
    assert frame["figures"]["kv_usage"] == 0.5
    assert frame["requests"][1]["block_table"] == [1, 4]


def test_watching_stats_prints_each_frame_until_interrupted(daemon: FakeDaemon, start: Start) -> None:
    process = start("stats", "--watch", "--json", stdout=subprocess.PIPE)
    stop = threading.Event()

    def publish() -> None:
        while not stop.wait(0.02):
            daemon.publish(daemon.frame)

    threading.Thread(target=publish, daemon=True).start()
    assert [json.loads(process.stdout.readline())["model"] for _ in range(3)] == ["tiny"] * 3
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    stop.set()


def test_usage_and_cost_are_text_or_json(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("usage") == run("cost") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("who ")
    assert "requests x1, tokens x2" in printed
    assert "J / output token" in printed
    assert run("usage", "--json") == run("cost", "--json") == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["callers"] == second["callers"]
    assert first["since_start"]["joules_per_token"] == 0.25


def test_prefixes_and_events_are_text_or_json(daemon: FakeDaemon, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.frame.events = [Event(seq=1, time_s=0.0, kind="engine", reason="ready")]
    assert run("prefixes") == run("events") == 0
    text = capsys.readouterr().out
    assert "d1           2       8" in text
    assert "engine    ready" in text
    assert run("prefixes", "--json") == run("events", "--json") == 0
    tree, events = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert tree["nodes"][0]["user"] == "ana"
    assert events[0]["reason"] == "ready"
    assert run("prefixes", "--limit", "7") == 0
    assert [daemon.hear(GetPrefixes).limit for _ in range(3)] == [100, 100, 7]


def test_a_terminal_without_unicode_gets_ascii(daemon: FakeDaemon, start: Start) -> None:
    daemon.words = ["naïve 世"]
    plain = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    process = start("blocks", stdout=subprocess.PIPE, environ=plain)
    assert b"0000 aS.:b:.." in process.stdout.read()
    process = start("generate", "x", stdout=subprocess.PIPE, environ=plain)
    assert process.stdout.read() == b"na?ve ?\n"
    assert process.wait(60) == 0
