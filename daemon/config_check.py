"""Whether settings can serve, as far as device and model tell before anything is loaded: for `pagedd check-config`.

Owns the child process that looks (`config_check_process.py`): the engine's words need torch, which this side never has.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from pagedd.client.errors import PageddError
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.models import cache_directory, find_weights
from pagedd.daemon.restart_policy import FALLBACK_CODES, on_the_cpu
from pagedd.engine.config import EngineConfig

_COMMAND = (sys.executable, "-P", "-m", "pagedd.daemon.config_check_process")
_TIMEOUT_S = 120.0


class Question(msgspec.Struct, kw_only=True):
    """`has_model` is False when the weights are not there, so that only the device can be looked at."""

    config: EngineConfig
    has_model: bool


class Verdict(msgspec.Struct, kw_only=True):
    """`code` is empty when nothing is wrong. `chosen` is what the engine takes where a setting leaves it the choice."""

    code: str = ""
    message: str = ""
    chosen: dict[str, str | int | float] = {}
    notes: list[str] = []


async def check_startable(config: DaemonConfig, report: Callable[[str], None]) -> dict[str, str | int | float]:
    """What the engine takes where settings leave it the choice, by their names.

    Fetches nothing; `report` hears what is not looked at, and what will not be used. Cancelling ends the child. Raises
    `PageddError` with what the engine would refuse.
    """
    weights = await asyncio.to_thread(find_weights, config.model)
    engine_config = replace(config.to_engine_config(str(weights)), kv_disk_directory=str(kv_directory(config)))
    if weights is None:
        report(f"{config.model} is not fetched yet, so only the device is checked (pagedd pull fetches it)")
    verdict = await _ask(Question(config=engine_config, has_model=weights is not None))
    if verdict.code in FALLBACK_CODES and config.device_fallback == "cpu":
        report(f"{verdict.code}: {verdict.message}; in its place the CPU would serve, which is checked instead")
        verdict = await _ask(Question(config=on_the_cpu(engine_config), has_model=weights is not None))
    if verdict.code:
        raise PageddError(verdict.code, verdict.message)
    for note in verdict.notes:
        report(note)
    return verdict.chosen


def kv_directory(config: DaemonConfig) -> Path:
    """Of the disk tier."""
    return config.kv_disk_directory or cache_directory() / "kv"


async def _ask(question: Question) -> Verdict:
    child = await asyncio.create_subprocess_exec(*_COMMAND, "--parent", str(os.getpid()), stdin=PIPE, stdout=PIPE)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            answer, _ = await child.communicate(msgspec.json.encode(question))
    except TimeoutError:
        raise PageddError("internal", f"the check takes over {_TIMEOUT_S:.0f} s; does the device answer?") from None
    finally:
        with suppress(ProcessLookupError):
            child.kill()  # no effect on one that has ended
        status = await child.wait()
    if status != 0:
        raise PageddError("internal", f"the check ended with status {status}; its last lines on standard error say why")
    return msgspec.json.decode(answer, type=Verdict)
