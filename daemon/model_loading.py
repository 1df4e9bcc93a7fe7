"""From a model's name to what serves it: its text side, and the settings of its engine.

Owns the order: find and fetch (`model_process.py`), ask the engine's own code whether it could serve
(`config_check.py`), read the text side. Nothing that serves is touched by it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple

from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.config_check import check_startable, kv_directory
from pagedd.daemon.gpus import freest_device, load_nvml
from pagedd.daemon.model_process import resolve_in_child
from pagedd.daemon.prepared import load_prepared
from pagedd.daemon.served_model import ServedModel
from pagedd.daemon.text.sample import sample_text
from pagedd.engine.config import EngineConfig

log = logging.getLogger(__name__)


class Candidate(NamedTuple):
    """A model that could be served. Whoever does not take it has to `close` its text side."""

    text_side: ServedModel
    engine: EngineConfig


# From a model's name (or path) and the name under which clients shall ask for it, None for its own.
FindModel = Callable[[str, str | None], Awaitable[Candidate]]


async def find_model(
    config: DaemonConfig, name: str, served_name: str | None, report: Callable[[str], None], *, check: bool
) -> Candidate:
    """Fetches and prepares the model if need be, with the other settings of `config`.

    `check` asks a child process first whether device and model fit. Without it, the engine's load will say.
    Raises `PageddError` with what `resolve_model`, the check or the tokenizer refuses.
    """
    config = replace(config, model=name)
    folder = await resolve_in_child(name, report)
    prepared = load_prepared(folder)
    if check:
        await check_startable(config, report)
    log.info("loading %s from %s", prepared.name, prepared.weights)
    engine = replace(config.to_engine_config(prepared.weights), kv_disk_directory=str(kv_directory(config)))
    if (freest := await asyncio.to_thread(lambda: freest_device(config.device, load_nvml()))) is not None:
        engine = replace(engine, device=freest)
    text_side = await asyncio.to_thread(ServedModel, folder, served_name)
    sample = text_side.tokenizer.encode(sample_text())
    return Candidate(text_side, replace(engine, kv_quality_token_ids=tuple(sample)))
