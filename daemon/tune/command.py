"""`pagedd tune`: flags, time, what is printed, and what is written.

Owns the terminal's side. What is tried is `tuning.py`'s, how is `trial.py`'s.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedd.client.endpoints import client_endpoints
from pagedd.client.errors import PageddError
from pagedd.client.exit_statuses import EXIT_INTERRUPTED
from pagedd.client.request_log import read_log
from pagedd.client.sync import Client
from pagedd.daemon.config import DEFAULT_FILE, load_config
from pagedd.daemon.tune.agreement import real_texts
from pagedd.daemon.tune.load import synthetic_load
from pagedd.daemon.tune.settings_file import merge, read_settings, refuse_unwritable, write_settings
from pagedd.daemon.tune.trial import Trial, TrialResult, run_trial
from pagedd.daemon.tune.tuning import Tried, Tuning, change, is_disturbed
from pagedd.engine.config import EngineConfig

# The first trial also builds kernels.
_LOAD_S = 300.0
# As many as there usually are. What each has for its load follows from the time left and what starting one takes.
_NUM_TRIALS = 20
_LEAST_RUN_S = 1.0
# Each key that `Tuning` may change, with a value: a file that takes these takes what is found.
_CHANGEABLE = {
    "enable_prefix_caching": True,
    "block_size": 16,
    "gpu_memory_utilization": 0.5,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "kv_cache_dtype": "bf16",
}

EXIT_UNDECIDED = 1


def tune(argv: list[str], report: Callable[[str], None]) -> int:
    """Tries settings on engines of its own and prints what each is worth; every other flag is the daemon's.

    Returns the exit status: `EXIT_UNDECIDED` when no setting could be compared with what holds, `EXIT_INTERRUPTED`
    after an interrupt, which keeps what was found until then.

    Raises `PageddError`: `already_running` beside a daemon that answers, or what reading settings and models raises.
    """
    options, flags = _parser().parse_known_args(argv)
    loaded = load_config(flags, program="pagedd tune").config
    settings_file = Path(options.settings_file or DEFAULT_FILE)
    if options.out is not None:
        refuse_unwritable(options.out, "out")
    if options.write:
        merge(read_settings(settings_file), _CHANGEABLE)
        refuse_unwritable(settings_file, "settings_file")
    if not options.anyway:
        _refuse_beside_a_daemon(loaded.runtime_dir)
    load = read_log(options.load, "load") if options.load is not None else synthetic_load()
    if options.load is not None and not any(entry.prompt_token_ids for entry in load):
        report("the log has lengths alone, so nothing is shared: what prefix caching brings cannot be seen")
    from pagedd.daemon.models import resolve_model
    from pagedd.daemon.prepared import load_prepared
    from pagedd.daemon.text.tokenizer import TextTokenizer

    folder = resolve_model(loaded.model, report=report)
    prepared = load_prepared(folder)
    config = loaded.to_engine_config(prepared.weights)
    texts = real_texts(TextTokenizer(folder, prepared))
    deadline_s = time.monotonic() + options.seconds
    num_users = options.users or 2 * config.max_num_seqs
    num_left, start_s = _NUM_TRIALS, 3.0

    def attempt(candidate: EngineConfig, texts: list[list[int]] | None) -> TrialResult:
        nonlocal num_left, start_s
        began_s = time.monotonic()
        left_s = deadline_s - began_s
        if left_s <= 0:
            raise TimeoutError
        run_s = max(_LEAST_RUN_S, left_s / num_left - start_s)
        trial = Trial(
            config=candidate,
            load=load,
            num_users=num_users,
            seconds=run_s * 2 / 3,
            warmup_s=run_s / 3,
            texts=texts,
        )
        result = run_trial(trial, timeout_s=_LOAD_S if candidate is config else max(5.0, left_s))
        start_s = max(0.0, time.monotonic() - began_s - run_s)
        num_left = max(1, num_left - 1)
        return result

    tuning = Tuning(config, attempt, texts, is_gpu=_has_gpu(config.device))
    report(f"{config.model}: {num_users} users, {options.seconds:.0f} s for about {_NUM_TRIALS} trials")
    print(_line("step", "setting", "before", "tokens/s", "gain", "first token", ""), flush=True)
    num_judged, num_disturbed, is_interrupted = 0, 0, False
    try:
        for tried in tuning.run():
            print(_tried(tried), flush=True)
            if not tried.changed and tried.result.error:
                raise PageddError("engine_failed", f"the settings as they are cannot be tried: {tried.result.error}")
            if not tried.is_repeated:
                num_judged += tried.is_judged
                num_disturbed += is_disturbed(tried.result)
    except TimeoutError:
        report(f"{options.seconds:.0f} s are over; what was found until then holds (--seconds for more)")
    except KeyboardInterrupt:
        is_interrupted = True
        report("interrupted; what was found until then holds")
    except OSError:  # nobody reads on, or the disk is full; minutes of trials are not lost with that
        _write(tuning.changes, options.out, settings_file if options.write else None, report)
        raise
    if num_disturbed:
        are = "trial is" if num_disturbed == 1 else "trials are"
        report(f"{num_disturbed} {are} not judged: other programs had the cores; end them and try again")
    written_to = settings_file if options.write and not is_interrupted else None
    try:
        _write(tuning.changes, options.out, written_to, report)
    finally:  # what no file takes can still be read
        print(_conclusion(tuning.changes, num_judged), end="", flush=True)
    if is_interrupted:
        return EXIT_INTERRUPTED
    return 0 if num_judged or tuning.changes else EXIT_UNDECIDED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagedd tune",
        allow_abbrev=False,
        description="Try settings on the model and a load, in the order in which they matter; all other flags are the "
        "daemon's (pagedd --help).",
        epilog=f"exit status: 0 settings were compared, {EXIT_UNDECIDED} none could be, {EXIT_INTERRUPTED} interrupted",
    )
    add_tune_flags(parser)
    return parser


def add_tune_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that are `pagedd tune`'s own."""
    parser.add_argument("--load", type=Path, metavar="FILE", help="a log of requests, JSON lines [a synthetic chat]")
    parser.add_argument("--users", type=_users, metavar="N", help="who ask at once, 1 to 65536 [two a seat]")
    parser.add_argument(
        "--seconds", type=_seconds, default=180.0, metavar="S", help="for all trials, 1 to 86400 [%(default)s]"
    )
    parser.add_argument("--write", action="store_true", help="put what was found into the settings file")
    parser.add_argument("--settings-file", metavar="FILE", help=f"the file that --write changes [{DEFAULT_FILE}]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write what was found, alone, to this file")
    parser.add_argument("--anyway", action="store_true", help="also beside a daemon that is running")


def _users(text: str) -> int:
    users = int(text)
    _check_range(users, 1, 65536)
    return users


def _seconds(text: str) -> float:
    seconds = float(text)
    _check_range(seconds, 1, 86400)
    return seconds


def _check_range(value: float, least: int, most: int) -> None:
    if not least <= value <= most:  # nor NaN
        raise argparse.ArgumentTypeError(f"{value}, allowed are {least} to {most}")


def _refuse_beside_a_daemon(runtime_dir: Path | None) -> None:
    endpoints = client_endpoints(None if runtime_dir is None else str(runtime_dir))
    try:
        with Client(endpoints.directory) as client:
            client.ping()
    except PageddError as error:
        if error.code == "daemon_unreachable":
            return
        raise
    raise PageddError(
        "already_running",
        f"a daemon serves {endpoints.directory} and would share the device; stop it, or pass --anyway",
    )


def _has_gpu(device: str) -> bool:
    return device.startswith("cuda") or (device == "auto" and os.path.exists("/dev/nvidiactl"))


def _write(
    changes: dict[str, Any], out: Path | None, settings_file: Path | None, report: Callable[[str], None]
) -> None:
    if not changes:
        for path in (out, settings_file):
            if path is not None:
                report(f"{path} is not written: there is nothing to write")
        return
    if out is not None:
        write_settings(out, merge("", changes), "out")
        report(f"written to {out}")
    if settings_file is not None:
        write_settings(settings_file, merge(read_settings(settings_file), changes), "settings_file")
        report(f"{settings_file} is changed; restart the daemon to use it")


def _conclusion(changes: dict[str, Any], num_judged: int) -> str:
    if changes:
        return f"\n{merge('', changes)}"
    judged = f"none of {num_judged} compared is better than" if num_judged else "no setting was compared with"
    return f"\n{judged} the settings as they are\n"


def _tried(tried: Tried) -> str:
    result = tried.result
    setting = ", ".join(f"{name} = {_shown(value)}" for name, value in tried.changed.items())
    gain = "" if tried.gain is None else change(tried.gain)
    before = "" if tried.before is None else f"{tried.before.output_tokens_per_s:.0f}"
    mark = "kept" if tried.is_kept and tried.changed else ""
    if result.error:
        return _line(tried.step, setting, before, "-", "", "-", result.error)
    if tried.is_repeated and not tried.changed:
        return _line(tried.step, "", "", "", "", "", tried.note)
    first = "-" if result.first_token_s is None else f"{1e3 * result.first_token_s:.0f} ms"
    notes = ", ".join(note for note in (mark, tried.note) if note)
    return _line(tried.step, setting, before, f"{result.output_tokens_per_s:.0f}", gain, first, notes)


def _line(step: str, setting: str, before: str, rate: str, gain: str, first_token: str, notes: str) -> str:
    return f"{step:<15} {setting:<32} {before:>6} {rate:>9} {gain:>7} {first_token:>12}  {notes}".rstrip()


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
