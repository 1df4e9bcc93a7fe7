"""From settings to a running engine: model, pool, scheduler, put together once.

The only place that knows all of them. Imports torch; `engine.py` and the scheduler do not.
"""

from collections.abc import Callable
from pathlib import Path

from pagedd.engine.config import EngineConfig, SchedulerConfig
from pagedd.engine.engine import Engine
from pagedd.engine.errors import EngineError
from pagedd.engine.info import EngineInfo
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.runner import create_runner
from pagedd.engine.scheduler import Scheduler

BLOCK_SIZES = (8, 16, 32)


def create_engine(config: EngineConfig, progress: Callable[[float, str], None]) -> tuple[Engine, EngineInfo]:
    """Loads the model and makes the engine, idle.

    Args:
        progress: called with the share done, 0 … 1, and what is being done.

    Raises:
        EngineError: `invalid_setting`, or what loading the model and sizing the pool raise.
    """
    if config.block_size not in BLOCK_SIZES:
        raise EngineError("invalid_setting", f"block_size {config.block_size}; use one of {BLOCK_SIZES}")
    runner, info = create_runner(config, progress)
    blocks = BlockManager(
        info.num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        namespace=(("model", Path(config.model).name), ("kv_cache_dtype", info.kv_cache_dtype)),
    )
    scheduler = Scheduler(
        SchedulerConfig(
            block_size=config.block_size,
            num_blocks=info.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            scheduling_policy=config.scheduling_policy,
            ageing_s_per_point=config.ageing_s_per_point,
            num_speculative_tokens=config.num_speculative_tokens,
        ),
        blocks,
    )
    return Engine(runner, scheduler), info
