"""One engine in a process of its own, under one load: whatever a setting does to it, the next trial begins afresh.

Owns what is asked of that process and what it answers, its start and its end. What runs in it is `trial_process.py`.
"""

import contextlib
import os
import signal
import subprocess
import sys

import msgspec

from pagedd.client.request_log import LoggedRequest
from pagedd.engine.config import EngineConfig


class Trial(msgspec.Struct, kw_only=True):
    """What to try. With `texts`, token ids each, also what the model chooses after their beginnings."""

    config: EngineConfig
    load: list[LoggedRequest]
    num_users: int
    seconds: float
    warmup_s: float
    texts: list[list[int]] | None = None


class TrialResult(msgspec.Struct, kw_only=True):
    """What came of it; `error` says why nothing did."""

    error: str = ""
    output_tokens_per_s: float = 0.0
    first_token_s: float | None = None
    mean_running: float = 0.0
    kv_usage: float = 0.0
    preemptions_per_s: float = 0.0
    waited_ratio: float = 0.0  # of the time, that it was ready to compute and others had the cores
    hit_ratio: float = 0.0
    kv_cache_dtype: str = ""
    max_num_batched_tokens: int = 0
    choices: list[int] | None = None


def run_trial(trial: Trial, timeout_s: float) -> TrialResult:
    """In a child process, which is gone when this returns or raises, with whatever it started."""
    command = [sys.executable, "-P", "-m", "pagedd.daemon.tune.trial_process", "--parent", str(os.getpid())]
    # A group of its own, so that an interrupt at the terminal is for us alone to handle.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as child:
        try:
            answer, said = child.communicate(msgspec.json.encode(trial), timeout_s)
        except subprocess.TimeoutExpired:
            return TrialResult(error=f"not done after {timeout_s:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    if not answer:
        last = said.decode(errors="replace").strip().splitlines()[-1:] or [f"status {child.returncode}"]
        return TrialResult(error=f"its process ended: {last[0]}")
    return msgspec.json.decode(answer, type=TrialResult)
