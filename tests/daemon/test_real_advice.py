"""Advice of a real daemon that is set up badly, as `pagectl doctor`, a frame and `/metrics` tell it."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from pagedd.client.sync import Client

from .conftest import RunningDaemon, StartDaemon

SYSTEM = [11] * 128


def doctor(daemon: RunningDaemon, *arguments: str) -> str:
    command = [sys.executable, "-P", "-m", "pagedd.client.pagectl", "--runtime-dir", str(daemon.endpoints.directory)]
    return subprocess.run([*command, "doctor", *arguments], capture_output=True, text=True, check=True).stdout


def test_a_healthy_daemon_gets_no_advice(serving_daemon: RunningDaemon) -> None:
    with Client(serving_daemon.endpoints.directory) as client:
        for number in range(20):
            client.generate(prompt_token_ids=[*SYSTEM, number], max_tokens=2).result()
    assert doctor(serving_daemon).startswith("nothing to advise after ")
    assert doctor(serving_daemon, "--json") == "[]\n"
    assert 'pagedd:advice{cause="repeated_prefixes"} 0.0' in serving_daemon.get("/metrics")[1]


def test_one_seat_and_no_prefix_cache_are_both_named(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--no-enable-prefix-caching", "--max-num-seqs", "1", "--num-threads", "1").wait_ready()
    with Client(daemon.endpoints.directory, timeout_s=120) as client, ThreadPoolExecutor(4) as pool:
        is_over = False

        def ask_until_over(number: int) -> None:
            while not is_over:
                client.generate(prompt_token_ids=[*SYSTEM, number], max_tokens=200, ignore_eos=True).result()

        askers = [pool.submit(ask_until_over, number) for number in range(4)]
        try:
            deadline_s = time.monotonic() + 120
            while (codes := [advice.cause for advice in client.stats().advice]) != ["repeated_prefixes", "idle_blocks"]:
                assert time.monotonic() < deadline_s, codes
                time.sleep(0.5)
        finally:
            is_over = True
        for asker in askers:
            asker.result()
    told = doctor(daemon)
    assert "  change  --enable-prefix-caching\n" in told
    assert "  change  --max-num-seqs 4\n" in told
    assert [advice["cause"] for advice in json.loads(doctor(daemon, "--json"))] == ["repeated_prefixes", "idle_blocks"]
    assert 'pagedd:advice{cause="idle_blocks"} 1.0' in daemon.get("/metrics")[1]
