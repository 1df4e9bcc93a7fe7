"""What the engine would choose where its settings leave it the choice, before a weight is read.

Raises what `create_engine` would, as far as that shows so early. What can be loaded is `model/load.py`'s.
"""

import os
from typing import Any

import torch

from pagedd.engine.config import DEFAULT_MEMORY_SHARE, EngineConfig
from pagedd.engine.create import DEFAULT_BATCHED_TOKENS, choose_kv_form, is_run_ahead
from pagedd.engine.errors import EngineError
from pagedd.engine.kv.storage import KVStorage
from pagedd.engine.model.config import DecoderConfig
from pagedd.engine.model.decoder import Checkpoint
from pagedd.engine.model.load import check_loadable, choose_dtype, num_physical_cores, usable_device
from pagedd.engine.model.weight_blocks import BlockCheckpoint
from pagedd.kernels import ops


def foresee(settings: EngineConfig, *, has_model: bool) -> dict[str, Any]:
    """Choices by the names of their settings. Without the model's files, only those that the device decides.

    Raises:
        EngineError: what the engine would refuse; `invalid_setting` for a pool that the machine can never hold.
    """
    device = usable_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    chosen: dict[str, Any] = {
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "async_scheduling": "on" if is_run_ahead("auto", device) else "off",
        "max_num_batched_tokens": DEFAULT_BATCHED_TOKENS[device.type],
        "gpu_memory_utilization": DEFAULT_MEMORY_SHARE[device.type],
    }
    if device.type == "cpu":
        chosen["num_threads"] = num_physical_cores()
    if has_model and (opened := check_loadable(settings)) is not None:
        config, checkpoint = opened
        chosen["max_model_len"] = config.max_position
        is_quantized = _has_quantized_weights(settings, config, checkpoint)
        form = choose_kv_form(settings.kv_cache_dtype, dtype, config.head_dim, beside_quantized=is_quantized)
        # Other kernels than the best hold weights otherwise; which run is seen when they are built.
        if settings.kv_cache_dtype == "auto" and ops.BACKEND_VARIABLE not in os.environ:
            chosen["kv_cache_dtype"] = form.name
        bytes_per_block = KVStorage.bytes_per_block(config, form, settings.block_size)
        _refuse_larger_than_the_machine(settings, device, bytes_per_block)
    return chosen


def _has_quantized_weights(settings: EngineConfig, config: DecoderConfig, checkpoint: Checkpoint) -> bool:
    """Whether the weights will be, as far as the file's names tell."""
    if settings.weight_dtype != "auto":
        return settings.weight_dtype in ("int8", "int4")
    if settings.dtype == "float32" or not isinstance(checkpoint, BlockCheckpoint):
        return False
    names = (f"model.layers.{index}.mlp.down_proj.weight" for index in range(config.num_layers))
    return any(map(checkpoint.is_quantized, names))


def _refuse_larger_than_the_machine(settings: EngineConfig, device: torch.device, bytes_per_block: int) -> None:
    """A pool whose size is given is refused only where it can never be had, whatever is free now."""
    if settings.num_blocks is None:
        return
    if device.type == "cuda":
        machine_bytes = torch.cuda.get_device_properties(device).total_memory
    else:
        machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    pool_bytes = settings.num_blocks * bytes_per_block
    if pool_bytes > machine_bytes:
        raise EngineError(
            "invalid_setting",
            f"num_blocks {settings.num_blocks} of {bytes_per_block} bytes take {pool_bytes / 2**30:.1f} GiB, {device} "
            f"has {machine_bytes / 2**30:.1f}; {machine_bytes // bytes_per_block} would fill it",
        )
