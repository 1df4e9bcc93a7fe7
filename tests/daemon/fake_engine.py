"""An engine process without torch: the real loop and link of `engine_process.py` around an engine that a test scripts.

`$FAKE_ENGINE_LOAD`, or else `EngineConfig.model`, says how loading goes, the first prompt token what the request does.
Every other request gets one token a step until `max_tokens`: the prompt's last id plus one and upwards, modulo 1000.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

from pagedd.daemon import engine_process
from pagedd.engine.config import EngineConfig
from pagedd.engine.errors import DeviceLostError, EngineError
from pagedd.engine.info import EngineInfo
from pagedd.engine.kv.prefix_tree import PrefixRun, PrefixTree
from pagedd.engine.kv.quality import KVQuality
from pagedd.engine.request import Preemption, Request, SequenceOutput, TokenLogprobs
from pagedd.engine.stats import BlockInfo, EngineSnapshot, EngineStats, Eviction, SequenceSnapshot


class Prompt(IntEnum):
    """First prompt tokens with a meaning."""

    REFUSE = 1001
    CRASH = 1002
    VANISH = 1003
    HANG = 1004
    SLOW = 1005
    PREEMPT = 1006  # in its first step it loses its seat to a request called `other`
    LOSE_DEVICE = 1007


class FakeEngine:
    def __init__(self, *, dies_of_exit: bool = False) -> None:
        self.dies_of_exit = dies_of_exit
        self.live: dict[str, tuple[Request, int]] = {}
        self.num_steps = 0
        self.preemptions: list[Preemption] = []

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def add(self, request: Request) -> None:
        if request.prompt_token_ids[0] == Prompt.REFUSE:
            raise EngineError("exceeds_kv_pool", "9 blocks, limit 6")
        self.live[request.request_id] = (request, 0)

    def abort(self, request_id: str, choice_index: int | None = None) -> bool:
        return self.live.pop(request_id, None) is not None

    def set_priority(self, request_id: str, priority: int) -> bool:
        return request_id in self.live

    def pace(self, tokens_per_second: float | None) -> None:
        pass

    def step(self) -> list[SequenceOutput]:
        self.num_steps += 1
        self.preemptions = []
        outputs = []
        for request_id, (request, done) in list(self.live.items()):
            match request.prompt_token_ids[0]:
                case Prompt.CRASH:
                    raise RuntimeError("scripted fault")
                case Prompt.LOSE_DEVICE:
                    raise DeviceLostError("the device answers with: scripted error")
                case Prompt.VANISH:
                    os._exit(9)
                case Prompt.HANG:
                    time.sleep(600)
                case Prompt.SLOW:
                    time.sleep(0.02)
                case Prompt.PREEMPT if done == 0:
                    self.preemptions.append(
                        Preemption(request_id=request_id, choice_index=0, by_request_id="other", for_what="seat")
                    )
            done += 1
            self.live[request_id] = (request, done)
            is_last = done == request.params.max_tokens
            if is_last:
                del self.live[request_id]
            token_id = (request.prompt_token_ids[-1] + done) % 1000
            num_top = request.params.num_logprobs
            top = [(token_id + rank, -0.5 - rank) for rank in range(num_top or 0)]
            outputs += [
                SequenceOutput(
                    request_id=request_id,
                    choice_index=index,
                    token_ids=[token_id],
                    logprobs=None if num_top is None else [TokenLogprobs(logprob=-0.5, top=top)],
                    finish_reason="length" if is_last else None,
                )
                for index in range(request.params.n)
            ]
        time.sleep(0.001)
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            num_blocks=6,
            block_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=16,
            max_model_len=24,
            num_blocks_used=len(self.live),
            num_blocks_free=6 - len(self.live),
            num_requests_running=len(self.live),
            steps_total=self.num_steps,
        )

    def snapshot(self) -> EngineSnapshot:
        sequences = [
            SequenceSnapshot(
                request_id=request_id,
                choice_index=0,
                state="decode",
                priority=request.priority,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=0,
                num_computed_tokens=len(request.prompt_token_ids) + done,
                num_output_tokens=done,
                num_preemptions=0,
                age_s=0.0,
                first_token_s=None,
                block_table=[0],
            )
            for request_id, (request, done) in self.live.items()
        ]
        return EngineSnapshot(stats=self.stats(), block_states=bytes(6), block_ref_counts=bytes(6), sequences=sequences)

    def block(self, index: int) -> BlockInfo | None:
        if index >= 6:
            return None
        return BlockInfo(
            state="free", ref_count=0, owners=[], token_ids=[], digest=None, extras=(), num_hits=0, last_use_s=None
        )

    def prefixes(self, limit: int) -> PrefixTree:
        run = PrefixRun(
            digest=b"d" * 16,
            parent=None,
            depth=0,
            num_blocks=1,
            num_hits=0,
            last_use_s=0.5,
            state="cached",
            extras=(("caller", "uid:0"),),
            token_ids=(1, 2, 3, 4),
        )
        return PrefixTree(runs=[run][:limit], num_blocks=1, is_cut=False)

    def evict_prefix(self, digest: bytes) -> Eviction | None:
        return Eviction(1, 0) if digest == b"d" * 16 else None

    idle_work_due_s = None

    def after_step(self) -> bool:
        return False

    def check_when_idle(self) -> bool:
        return False

    def close(self, limit_s: float) -> None:
        if self.dies_of_exit:
            raise RuntimeError("scripted fault")


INFO = EngineInfo(
    device="cpu",
    device_name="a fake",
    dtype="float32",
    kv_cache_dtype="float32",
    kernel_backend="none",
    vocab_size=49152,
    max_model_len=2048,
    max_request_tokens=2048,
    block_size=4,
    num_blocks=6,
    kv_bytes_per_token=2,
    kv_open_bytes=0,
    max_num_seqs=8,
    max_num_batched_tokens=16,
    model_bytes=1,
    load_seconds=0.0,
)


def create_engine(
    config: EngineConfig, progress: Callable[[float, str], None]
) -> tuple[engine_process.EngineLike, EngineInfo]:
    """`ok`, `ok-until-exit`, `slow`, `until:PATH` is there, `error:CODE`, `fault`, `vanish`, `vanish-once:PATH`, which
    the first makes; `checks` its cache, and finds its own pid. Or for a device: `away` but on a CPU, `away-while:PATH`
    is there.
    """
    kind, _, argument = os.environ.get("FAKE_ENGINE_LOAD", config.model).partition(":")
    if kind == "slow":
        for percent in range(0, 100, 43):
            progress(percent / 100, "weights")
            time.sleep(0.1)
        time.sleep(600)
    while kind == "until" and not Path(argument).exists():
        time.sleep(0.02)
    if kind == "away" and config.device != "cpu":
        raise EngineError("device_unavailable", "scripted")
    if kind == "away-while" and Path(argument).exists():
        raise EngineError("device_unavailable", "scripted")
    if kind == "error":
        raise EngineError(argument, "scripted")
    if kind == "fault":
        raise RuntimeError("scripted fault")
    if kind == "vanish" or (kind == "vanish-once" and not Path(argument).exists()):
        if argument:
            Path(argument).touch()
        os._exit(9)
    length = config.max_model_len or INFO.max_model_len
    info = replace(INFO, max_model_len=length, max_request_tokens=length)
    if kind == "checks":
        found = KVQuality(form="int8", agreement=0.95, divergence_nats=0.01, num_tokens=os.getpid())
        info = replace(info, kv_quality=config.kv_quality or found)
    return FakeEngine(dies_of_exit=kind == "ok-until-exit"), info


if __name__ == "__main__":
    sys.exit(engine_process.main(import_engine=lambda: create_engine))
