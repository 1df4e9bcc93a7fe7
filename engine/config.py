"""The engine's settings, frozen. No torch. Names are the flags' names; `daemon/config.py` fills them."""

from dataclasses import dataclass

from pagedd.engine.kv.quality import KVQuality

BLOCK_SIZES = (8, 16, 32)
# Of free memory, by the kind of device: what the pool takes where nobody says.
DEFAULT_MEMORY_SHARE = {"cpu": 0.3, "cuda": 0.9}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine process needs to start. `None` is "choose for this machine".

    Attributes:
        model: path of a GGUF file, or of a folder with config.json and safetensors.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        dtype: of weights and activations: `auto`, `float32`, `bfloat16` or `float16`.
        weight_dtype: form of the weights on a CPU: `auto` (what the file has), `float32`, `bf16`, `int8` or `int4`.
        kv_cache_dtype: form of the KV cache: `auto` (int8 beside quantized weights, else that of the activations),
            `float32`, `bf16`, `fp16`, `fp8`, `int8`, `k8v4` (keys in 8 bits, values in 4) or `int4`.
        kv_quality_check: what to do when a quantized cache is not as good as it should be: `warn`, `refuse`, or `off`,
            which does not measure it.
        kv_quality_token_ids: the text to measure it on; empty measures nothing.
        kv_quality: what an engine with these settings found on it before: of the same form, it is not measured again.
        block_size: tokens per KV block: 8, 16 or 32.
        num_blocks: exact pool size; None sizes it from free memory.
        gpu_memory_utilization: share of the device's *free* memory for the pool; None is 0.9 on a GPU, 0.3 on a CPU.
        max_num_seqs: seats: sequences that run at once.
        max_num_batched_tokens: token budget of a step; None is 512 on a CPU, 2048 on a GPU.
        max_model_len: longest prompt + output; None is the model's own context.
        enable_prefix_caching: reuse the blocks of shared prefixes.
        kv_host_gib: host memory for blocks that the pool evicts, in GiB; 0 is off.
        kv_disk_gib: disk space for blocks that outlive the engine, in GiB; 0 is off, as is no `kv_disk_directory`.
        scheduling_policy: `priority`, or `fcfs` which ignores priorities.
        ageing_s_per_point: seconds of waiting that outweigh one point of priority, so that every wait is bounded.
        num_speculative_tokens: longest guess at a sequence's next tokens from its own text; 0 guesses nothing.
        async_scheduling: form the next step while the device computes one: `auto` (on a GPU), `on` or `off`.
        enforce_eager: no CUDA graphs.
        num_threads: torch threads on a CPU; None is the number of physical cores.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    weight_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_quality_check: str = "warn"
    kv_quality_token_ids: tuple[int, ...] = ()
    kv_quality: KVQuality | None = None
    block_size: int = 16
    num_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    kv_host_gib: float = 0.0
    kv_disk_gib: float = 0.0
    kv_disk_directory: str | None = None
    scheduling_policy: str = "priority"
    ageing_s_per_point: float = 0.5
    num_speculative_tokens: int = 7
    async_scheduling: str = "auto"
    enforce_eager: bool = False
    num_threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's share of the settings, every value known.

    Attributes:
        max_num_batched_tokens: token budget of a step, >= 1.
        max_model_len: longest prompt + output that a request may ask for.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    scheduling_policy: str = "priority"
    ageing_s_per_point: float = 0.5
    num_speculative_tokens: int = 0
