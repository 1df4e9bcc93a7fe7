"""Which settings do not fit a model: said before its weights are read, from what its config alone tells."""

from collections.abc import Set

from pagedd.engine.config import EngineConfig
from pagedd.engine.errors import EngineError
from pagedd.kernels.kv_form import FORMS


def refuse_unfit(settings: EngineConfig, max_position: int, kv_forms: Set[str]) -> None:
    """
    Args:
        max_position: the model's own context, tokens.
        kv_forms: names of the forms of the KV cache that its kernels have here.

    Raises:
        EngineError: `invalid_setting`.
    """
    if settings.max_model_len is not None and settings.max_model_len > max_position:
        raise EngineError(
            "invalid_setting",
            f"max_model_len {settings.max_model_len}, the model's own context is {max_position}; lower max_model_len",
        )
    if settings.kv_cache_dtype == "auto":
        return
    if settings.kv_cache_dtype not in kv_forms:
        usable = ", ".join(form for form in FORMS if form in kv_forms)
        raise EngineError(
            "invalid_setting",
            f"kv_cache_dtype {settings.kv_cache_dtype!r}, this model's kernels here have {usable}; use one of these "
            "or auto",
        )
    if FORMS[settings.kv_cache_dtype].has_open_keys and settings.block_size % 16:
        raise EngineError(
            "invalid_setting",
            f"block_size {settings.block_size} with kv_cache_dtype {settings.kv_cache_dtype}, whose scales a block "
            "would take more than its 4-bit keys save; use block_size 16 or 32",
        )
