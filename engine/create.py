"""From settings to a running engine: model, pool, scheduler, put together once.

The only place that knows all of them. Imports torch; `engine.py` and the scheduler do not.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagedd.engine.config import EngineConfig, SchedulerConfig
from pagedd.engine.engine import Engine
from pagedd.engine.errors import EngineError
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.runner import create_runner
from pagedd.engine.scheduler import Scheduler

BLOCK_SIZES = (8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the engine chose for this machine; every value known.

    Attributes:
        max_model_len: longest prompt + output that model and settings allow.
        max_request_tokens: the same, also bounded by what the whole pool holds.
        kv_bytes_per_token: of all layers, keys and values.
        model_bytes: what the weights take.
    """

    device: str
    device_name: str
    dtype: str
    kv_cache_dtype: str
    kernel_backend: str
    vocab_size: int
    max_model_len: int
    max_request_tokens: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    max_num_seqs: int
    max_num_batched_tokens: int
    model_bytes: int
    load_seconds: float


def create_engine(config: EngineConfig, progress: Callable[[float, str], None]) -> tuple[Engine, EngineInfo]:
    """Loads the model and makes the engine, idle.

    Args:
        progress: called with the share done, 0 … 1, and what is being done.

    Raises:
        EngineError: `invalid_setting`, or what loading the model and sizing the pool raise.
    """
    started = time.perf_counter()
    if config.block_size not in BLOCK_SIZES:
        raise EngineError("invalid_setting", f"block_size {config.block_size}; use one of {BLOCK_SIZES}")
    runner, chosen = create_runner(config, progress)
    blocks = BlockManager(
        chosen.num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        namespace=(("model", Path(config.model).name), ("kv_cache_dtype", chosen.kv_cache_dtype)),
    )
    scheduler = Scheduler(
        SchedulerConfig(
            block_size=config.block_size,
            num_blocks=chosen.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=chosen.max_num_batched_tokens,
            max_model_len=chosen.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            scheduling_policy=config.scheduling_policy,
            ageing_s_per_point=config.ageing_s_per_point,
        ),
        blocks,
    )
    info = EngineInfo(
        device=chosen.device,
        device_name=chosen.device_name,
        dtype=chosen.dtype,
        kv_cache_dtype=chosen.kv_cache_dtype,
        kernel_backend=chosen.kernel_backend,
        vocab_size=chosen.vocab_size,
        max_model_len=chosen.max_model_len,
        max_request_tokens=min(chosen.max_model_len, chosen.num_blocks * config.block_size + 1),
        block_size=config.block_size,
        num_blocks=chosen.num_blocks,
        kv_bytes_per_token=chosen.kv_bytes_per_token,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        model_bytes=chosen.model_bytes,
        load_seconds=time.perf_counter() - started,
    )
    return Engine(runner, scheduler), info
