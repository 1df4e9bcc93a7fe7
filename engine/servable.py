"""Which requests can be served at all, whatever else is live: said before anything is queued."""

from pagedd.engine.config import SchedulerConfig
from pagedd.engine.errors import EngineError
from pagedd.engine.request import Request


def refuse_unservable(request: Request, config: SchedulerConfig) -> None:
    """
    Raises:
        EngineError: `empty_prompt`, `prompt_too_long`, or `exceeds_kv_pool` for one that could not fit the pool even
            alone.
    """
    params = request.params
    num_prompt, num_total = len(request.prompt_token_ids), len(request.prompt_token_ids) + params.max_tokens
    if num_prompt == 0:
        raise EngineError("empty_prompt", "the prompt holds no token; give at least one")
    if num_total > config.max_model_len:
        raise EngineError(
            "prompt_too_long",
            f"{num_prompt} prompt tokens + max_tokens {params.max_tokens} = {num_total}, context "
            f"{config.max_model_len}; shorten the prompt or lower max_tokens",
        )
    # The last token drawn is never computed, so its KV needs no slot.
    num_blocks = -(-(num_total - 1) // config.block_size)
    if num_blocks > config.num_blocks:
        raise EngineError(
            "exceeds_kv_pool",
            f"{num_prompt} prompt tokens + max_tokens {params.max_tokens} need {num_blocks} blocks of "
            f"{config.block_size}, the pool has {config.num_blocks}; lower max_tokens or give the pool more memory",
        )
