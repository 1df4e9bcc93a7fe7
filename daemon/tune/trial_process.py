"""The process of one trial: an engine, what it chooses, and what its users see.

    python -P -m pagedd.daemon.tune.trial_process --parent PID < TRIAL

One JSON object goes in, one comes out. It ends with its parent.
"""

import argparse
import logging
import statistics
import sys
import time
from pathlib import Path

import msgspec

from pagedd.daemon.core_files import forbid_core_files
from pagedd.daemon.parent import die_with_parent
from pagedd.daemon.tune import agreement
from pagedd.daemon.tune.load import make_users
from pagedd.daemon.tune.trial import Trial, TrialResult
from pagedd.daemon.tune.users import measure
from pagedd.engine.create import create_engine
from pagedd.engine.errors import EngineError


def main() -> None:
    parser = argparse.ArgumentParser(description="Started by pagedd tune.")
    parser.add_argument("--parent", required=True, type=int)
    forbid_core_files()
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
    engine, info = create_engine(trial.config, lambda share, what: None)
    choices = None if trial.texts is None else agreement.choices(engine, trial.texts)
    users = make_users(trial.load, trial.num_users, info.vocab_size, info.max_request_tokens)
    started_s, waited_s = time.perf_counter(), seconds_without_core()
    measured = measure(engine, users, seconds=trial.seconds, warmup_s=trial.warmup_s)
    waited_ratio = (seconds_without_core() - waited_s) / (time.perf_counter() - started_s)
    steps = max(1, measured.num_steps)
    return TrialResult(
        error=measured.error,
        output_tokens_per_s=measured.output_tokens_per_s,
        first_token_s=statistics.median(measured.first_token_s) if measured.first_token_s else None,
        mean_running=measured.mean_running,
        kv_usage=measured.sum_used_blocks / steps / info.num_blocks,
        preemptions_per_s=measured.num_preemptions / measured.seconds if measured.seconds else 0.0,
        waited_ratio=waited_ratio,
        hit_ratio=measured.num_cached_tokens / measured.num_prompt_tokens if measured.num_prompt_tokens else 0.0,
        kv_cache_dtype=info.kv_cache_dtype,
        max_num_batched_tokens=info.max_num_batched_tokens,
        choices=choices,
    )


def seconds_without_core() -> float:
    """How long this process's first thread has waited for a core so far; 0 where the kernel does not say."""
    try:
        _, waited_ns, _ = Path("/proc/self/schedstat").read_text().split()
    except OSError:
        return 0.0
    return int(waited_ns) / 1e9


if __name__ == "__main__":
    main()
