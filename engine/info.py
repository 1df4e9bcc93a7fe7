"""What an engine chose for its machine: facts that hold for its whole life. No torch, so that the front reads them."""

from dataclasses import dataclass

from pagedd.engine.kv.quality import KVQuality


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Every value known; made once, by `create.create_runner`.

    Attributes:
        kv_cache_dtype: name of the cache's form, as in the setting; never `auto`.
        kernel_backend: name of the kernels' backend.
        max_model_len: longest prompt + output that the model's context and the settings allow.
        max_request_tokens: the same, also bounded by what the whole pool holds.
        kv_bytes_per_token: of all layers, keys and values, with what scales and padding take.
        kv_open_bytes: beside the pool, for keys in 16 bits of blocks that are not full; 0 for forms without such.
        kv_quality: of a quantized cache beside one in 16 bits, where it was measured.
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
    kv_open_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    model_bytes: int
    load_seconds: float
    kv_quality: KVQuality | None = None
