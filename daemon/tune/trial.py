"""One engine in a process of its own, under one load: whatever a setting does to it, the next trial begins afresh.

    python -P -m pagedd.daemon.tune.trial --parent PID < TRIAL

Owns that process from both ends: `run_trial` starts it and waits, `main` is what runs in it. One JSON object goes in,
one comes out. It ends with its parent.
"""

import argparse
import contextlib
import logging
import os
import signal
import statistics
import subprocess
import sys

import msgspec

from pagedd.daemon.parent import die_with_parent
from pagedd.daemon.tune import agreement
from pagedd.daemon.tune.load import Entry, make_users
from pagedd.daemon.tune.users import measure
from pagedd.engine.config import EngineConfig
from pagedd.engine.errors import EngineError


class Trial(msgspec.Struct, kw_only=True):
    """What to try. With `texts`, also what the model chooses after their beginnings; an empty list draws them first."""

    config: EngineConfig
    load: list[Entry]
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
    hit_ratio: float = 0.0
    kv_cache_dtype: str = ""
    max_num_batched_tokens: int = 0
    texts: list[list[int]] | None = None
    choices: list[int] | None = None


def run_trial(trial: Trial, timeout_s: float) -> TrialResult:
    """In a child process, which is gone when this returns or raises, with whatever it started."""
    command = [sys.executable, "-P", "-m", "pagedd.daemon.tune.trial", "--parent", str(os.getpid())]
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Started by pagedd tune.")
    parser.add_argument("--parent", required=True, type=int)
    die_with_parent(parser.parse_args().parent)
    logging.basicConfig(level=logging.WARNING)
    trial = msgspec.json.decode(sys.stdin.buffer.read(), type=Trial)
    try:
        result = perform(trial)
    except EngineError as error:
        result = TrialResult(error=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(result))


def perform(trial: Trial) -> TrialResult:
    """Raises `EngineError` when the engine cannot be had with these settings."""
    from pagedd.engine.create import create_engine

    engine, info = create_engine(trial.config, lambda share, what: None)
    texts, choices = trial.texts, None
    if texts is not None:
        texts = texts or agreement.draw_texts(engine, info.vocab_size)
        choices = agreement.choices(engine, texts)
    users = make_users(trial.load, trial.num_users, info.vocab_size, info.max_request_tokens)
    measured = measure(engine, users, seconds=trial.seconds, warmup_s=trial.warmup_s)
    steps = max(1, measured.num_steps)
    return TrialResult(
        error=measured.error,
        output_tokens_per_s=measured.output_tokens_per_s,
        first_token_s=statistics.median(measured.first_token_s) if measured.first_token_s else None,
        mean_running=measured.mean_running,
        kv_usage=measured.sum_used_blocks / steps / info.num_blocks,
        preemptions_per_s=measured.num_preemptions / measured.seconds if measured.seconds else 0.0,
        hit_ratio=measured.num_cached_tokens / measured.num_prompt_tokens if measured.num_prompt_tokens else 0.0,
        kv_cache_dtype=info.kv_cache_dtype,
        max_num_batched_tokens=info.max_num_batched_tokens,
        texts=texts,
        choices=choices,
    )


if __name__ == "__main__":
    main()
