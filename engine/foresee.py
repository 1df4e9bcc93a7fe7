"""What the engine would choose where its settings leave it the choice, before a weight is read.

Raises what `create_engine` would, as far as that shows so early. What can be loaded is `model/load.py`'s.
"""

import os
from typing import Any

from pagedd.engine.config import DEFAULT_MEMORY_SHARE, EngineConfig
from pagedd.engine.create import DEFAULT_BATCHED_TOKENS, is_run_ahead
from pagedd.engine.kv.pool_check import choose_kv_form, has_quantized_weights
from pagedd.engine.model.device import choose_dtype, num_physical_cores, usable_device
from pagedd.engine.model.load import check_loadable
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
        is_quantized = has_quantized_weights(settings, config, checkpoint)
        form = choose_kv_form(settings.kv_cache_dtype, dtype, config.head_dim, beside_quantized=is_quantized)
        # Other kernels than the best hold weights otherwise; which run is seen when they are built.
        if settings.kv_cache_dtype == "auto" and ops.BACKEND_VARIABLE not in os.environ:
            chosen["kv_cache_dtype"] = form.name
    return chosen
