"""One picture of the daemon: what the stats socket sends, what answers `GetStats`, and what recordings are made of.

Owns names, types and units. Every field that came later has a default, so that older daemons and recordings are still
read. What the figures mean is defined in `engine/stats.py`; frames are made in `daemon/frames.py`.
"""

import msgspec


class RequestRow(msgspec.Struct, kw_only=True):
    """One sequence as the engine sees it. Times are in s; `None` is "not yet". `block_table` is logical → physical.

    Attributes:
        state: waiting, prefill, decode or preempted.
        model: the served name that it asked for.
        number: counts the engine's sequences by arrival; None in frames of older versions.
        num_scheduled_tokens: computed for it in the last step: 0, a token and its guesses, or a prefill chunk.
        max_tokens: most tokens that it may produce; None when the request has just ended.
        preview: the prompt's first characters, in one line. Empty on the stats socket, which everybody hears; an answer
            to `GetStats` has it for those who may see it (see `BlockDetail` in `protocol.py`). It does not change:
            `GetPreviews` once a request is enough.
    """

    request_id: str
    index: int
    user: str
    state: str
    priority: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_preemptions: int
    age_s: float
    first_token_s: float | None
    block_table: list[int] = []
    model: str = ""
    num_scheduled_tokens: int = 0
    max_tokens: int | None = None
    preview: str = ""
    number: int | None = None


class BlockMap(msgspec.Struct, kw_only=True):
    """Every block in physical order, a byte each. `fills` and `ages` are empty in frames of older versions.

    Attributes:
        states: 0 free, 1 cached, 2 used.
        ref_counts: saturate at 255.
        fills: slots that hold a token's KV; saturate at 255.
        ages: of cached blocks, how long ago they were used: 0 is under a second, k is [2^(k−1), 2^k) seconds.
    """

    block_size: int
    states: bytes
    ref_counts: bytes
    fills: bytes = b""
    ages: bytes = b""


class Device(msgspec.Struct, kw_only=True):
    """One GPU; each figure is None when the card, its driver or a container does not tell it.

    Attributes:
        index: NVML's.
        others: who else holds its memory, most first: (program, bytes or None), at most eight.
    """

    index: int
    name: str = ""
    utilization_percent: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    others: list[tuple[str, float | None]] = []


class Machine(msgspec.Struct, kw_only=True):
    """The computer that the daemon runs on; None is "not available".

    Attributes:
        cpu_percent: of all cores together, 0–100, since the frame before.
        memory_used_bytes: what programs could not have: total minus available.
        num_cores: logical ones.
        devices: the GPUs, the engine's own first; empty when the engine does not run on one.
    """

    cpu_percent: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    num_cores: int | None = None
    devices: list[Device] = []


class Event(msgspec.Struct, kw_only=True):
    """Something that happened. `seq` grows by one with each, from 1 at the daemon's start; `time_s` is Unix time.

    Attributes:
        kind: preemption, eviction (a burst of them), refusal, cancel, priority, engine, model, reload.
        reason: what and why, for people, with the numbers; never what a caller wrote.
        request_id: whom it befell, when it was one request.
    """

    seq: int
    time_s: float
    kind: str
    reason: str
    request_id: str = ""


class Advice(msgspec.Struct, kw_only=True):
    """Something that should be changed, as `daemon/advice.py` judges the last minutes of work.

    Attributes:
        cause: repeated_prefixes, fragmentation, idle_blocks, steady_preemptions, kv_quality or dominant_caller.
        finding: what is wrong, with its figures.
        change: the flag or setting, with a value where one follows.
        gain: what that should bring.
    """

    cause: str
    finding: str
    change: str
    gain: str


class Ending(msgspec.Struct, kw_only=True):
    """How a request ended. `outcome` is the finish reason of its last choice (`stop`, `length`, `abort`), or a code."""

    request_id: str
    outcome: str


class StatsFrame(msgspec.Struct, kw_only=True):
    """One picture of the daemon. `engine/stats.py` defines the figures; ratios are 0–1, `None` is "not available".

    Attributes:
        time_s: Unix time of the picture.
        figures: counters (`…_total`, since the engine started), gauges, and from the front the latencies of the last
            minute, in s: `first_token_seconds_p50`, `…_p95`, `inter_token_seconds_p50`, `…_p99`, and what energy and
            tokens cost (`daemon/cost.py`). Of a quantized cache, where it was compared with 16 bits at load:
            `kv_agreement_ratio`, the share of equal top tokens, and `kv_divergence_nats`.
        machine: None in frames of older versions.
        events: the newest ones, oldest first, at most 32; a viewer that has seen a frame looks at their `seq`. An
            answer to `GetStats` has all that the daemon keeps, 256.
        seq: grows by one with each picture that the daemon makes; 0 in frames of older versions.
        interval_s: on the stats socket, how long until the next one. Longer while a model on the CPU has all cores.
        advice: at most one of each cause, most worth first; empty when all is well.
        endings: of the requests that ended last, the newest at the end, at most 32.
    """

    version: str
    time_s: float
    uptime_s: float
    state: str
    detail: str
    model: str
    device: str
    dtype: str
    kv_cache_dtype: str
    figures: dict[str, float | None]
    requests: list[RequestRow]
    blocks: BlockMap | None = None
    machine: Machine | None = None
    events: list[Event] = []
    seq: int = 0
    interval_s: float = 0.25
    advice: list[Advice] = []
    endings: list[Ending] = []

    @property
    def state_in_words(self) -> str:
        """E.g. `ready`, `loading, 43 % (weights)`, `starting (loading, 0 % (engine process))`: no word twice."""
        if self.detail.startswith(self.state):
            return self.detail
        return f"{self.state} ({self.detail})" if self.detail else self.state


_decoder = msgspec.msgpack.Decoder(StatsFrame)


def decode_stats(payload: bytes) -> StatsFrame:
    """One frame of the stats socket. Raises like `protocol.decode_client`."""
    return _decoder.decode(payload)
