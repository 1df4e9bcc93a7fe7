"""The wall clock is set, by hours and both ways, under a daemon that runs: nothing is decided by it.

`wall_clock.c` moves it for the daemon's processes alone.
"""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from pagedd.client.request_log import arrivals_s, read_log
from pagedd.client.sync import Client

from .conftest import StartDaemon
from .fake_engine import Prompt
from .test_server import InBackground, completion, engine_of

HOUR_S = 3600


class Clock:
    """What a daemon with `environ` takes for the wall clock."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            pytest.skip("no C compiler")
        library, source = folder / "wall_clock.so", Path(__file__).with_name("wall_clock.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", library, source], check=True)
        self._file = folder / "wall_clock"
        self.set(0)
        self.environ = {"LD_PRELOAD": str(library), "WALL_CLOCK_FILE": str(self._file)}

    def set(self, ahead_s: int) -> None:
        """At once: no reader sees half of it."""
        new = self._file.with_suffix(".new")
        new.write_text(str(ahead_s))
        new.replace(self._file)


def test_a_daemon_whose_clock_jumps_by_hours_serves_and_counts_on(start_daemon: StartDaemon, tmp_path: Path) -> None:
    clock, requests, settings = Clock(tmp_path), tmp_path / "requests.jsonl", tmp_path / "pagedd.toml"
    settings.write_text("[quota]\ntokens_per_minute = 1000\n")
    daemon = start_daemon(
        "--idle-sleep-seconds=1800",
        f"--request-log={requests}",
        f"--config={settings}",
        fake_engine=True,
        environ=clock.environ,
    ).wait_ready()
    engine = engine_of(daemon)
    with Client(daemon.endpoints.directory) as client:
        for ahead_s in (0, 12 * HOUR_S, -12 * HOUR_S, 30 * 24 * HOUR_S):
            running = InBackground(daemon, [Prompt.SLOW], max_tokens=30)
            clock.set(ahead_s)
            running.join()
            assert running.answer[0] == 200
            frame = client.stats()
            assert frame.time_s == pytest.approx(time.time() + ahead_s, abs=60), "what is shown is what the clock says"
            assert (frame.state, frame.uptime_s < 600) == ("ready", True)
            assert engine.is_running(), "no engine hung, slept, or was ended"
        # 31 tokens four times; the bucket did not fill up by hours, nor is it empty for them.
        status, body = completion(daemon, [5], max_tokens=950)
        assert (status, json.loads(body)["error"]["code"]) == (429, "over_quota")
        assert completion(daemon, [5], max_tokens=3)[0] == 200
        retry_s = daemon_retry_s(body)
        assert 0 < retry_s <= 60
    assert daemon.stop() == 0
    entries = read_log(requests, "request_log")
    assert max(arrivals_s(entries)) < 600, "a replay waits as long as it was, whatever the clock said"
    assert max(entry.time_s for entry in entries) - min(entry.time_s for entry in entries) > 20 * HOUR_S


def daemon_retry_s(body: str) -> float:
    """From `…; try again in 3.4 s`."""
    return float(json.loads(body)["error"]["message"].rpartition(" in ")[2].removesuffix(" s"))
