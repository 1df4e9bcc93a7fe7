"""Frames of a daemon that is not there: a small scheduler plays requests on a pool, the same for the same seed.

Numbers are plausible and not more: blocks are taken, shared, cached and evicted, requests wait, prefill, decode and
leave, so that every screen has something to show.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from pagedd.client.questions import PrefixNode
from pagedd.client.stats_frame import BlockMap, Device, Event, Machine, RequestRow, StatsFrame

START_S = 1_700_000_000.0
BLOCK_SIZE = 16
_USERS = ("ana", "batch", "noor", "root")
_PROMPTS = ("Explain paged attention", "Translate to Danish: the sea", "Summarise these minutes", "Write a haiku")


@dataclass
class _Sequence:
    request_id: str
    user: str
    priority: int
    num_prompt_tokens: int
    max_tokens: int
    preview: str
    arrival_s: float
    state: str = "waiting"
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    first_token_s: float | None = None
    table: list[int] = field(default_factory=list)


class FakeEngine:
    """`frame()` plays the next quarter of a second and returns its picture.

    Args:
        num_requests: kept alive at once; whoever ends is followed by another.
        max_num_seqs: seats; the rest waits.
        num_devices: GPUs of the machine; 0 is a CPU alone.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 1024,
        num_requests: int = 14,
        max_num_seqs: int = 12,
        num_devices: int = 1,
        tokens_per_frame: int = 6,
        prompt_tokens: tuple[int, int] = (64, 900),
        chunk_tokens: int = 128,
        seed: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_devices = num_devices
        self.max_num_seqs = max_num_seqs
        self._num_requests = num_requests
        self._tokens_per_frame = tokens_per_frame
        self._prompt_tokens = prompt_tokens
        self._chunk_tokens = chunk_tokens
        self._draw = random.Random(seed)
        self._time_s = START_S
        self._sequences: list[_Sequence] = []
        self._num_made = 0
        self._seq = 0
        self._events: list[Event] = []
        self._totals = dict.fromkeys(
            ("generation", "prompt", "evictions", "preemptions", "queries", "hits", "steps"), 0
        )
        self._free = deque(range(num_blocks))
        self._cached: dict[int, float] = {}  # block: last use
        self._ref_counts = bytearray(num_blocks)
        self._fills = bytearray(num_blocks)
        # Every chat of a user begins with the same blocks.
        self._prefix: dict[str, list[int]] = {}

    def frame(self) -> StatsFrame:
        self._time_s += 0.25
        self._seq += 1
        self._play()
        return StatsFrame(
            version="0.1.0",
            time_s=self._time_s,
            uptime_s=self._time_s - START_S + 3600,
            state="ready",
            detail="",
            model="SmolLM2-135M-Instruct",
            device="cuda:0 RTX 4070" if self.num_devices else "cpu AMD EPYC",
            dtype="bfloat16",
            kv_cache_dtype="int8",
            figures=self._figures(),
            requests=[self._row(sequence) for sequence in self._sequences],
            blocks=self._map(),
            machine=self._machine(),
            events=self._events[-32:],
            seq=self._seq,
        )

    def prefixes(self) -> list[PrefixNode]:
        """A tree for the prefix screen: each user's common beginning, and two that go on from it."""
        nodes = []
        for position, user in enumerate(_USERS[:3]):
            root = f"{position}a3f9c01b2d4e5f6"
            nodes.append(
                PrefixNode(
                    digest=root,
                    parent="",
                    depth=0,
                    num_tokens=80,
                    num_blocks=5,
                    num_hits=120 - 40 * position,
                    age_s=0.4 + position,
                    state="used",
                    user=user,
                    text=f"You are a helpful assistant of {user}. Answer briefly.",
                )
            )
            for branch in range(2):
                nodes.append(
                    PrefixNode(
                        digest=f"{position}{branch}7cd4410f",
                        parent=root,
                        depth=80,
                        num_tokens=64 + 160 * branch,
                        num_blocks=4 + 10 * branch,
                        num_hits=9 * branch,
                        age_s=31.0 * (1 + branch),
                        state="cached",
                        user=user,
                        text=_PROMPTS[branch] if position != 2 else None,
                    )
                )
        return nodes

    def _play(self) -> None:
        while len(self._sequences) < self._num_requests:
            self._arrive()
        budget = 4 * self._chunk_tokens
        for sequence in list(self._sequences):
            running = sum(other.state in ("prefill", "decode") for other in self._sequences)
            if sequence.state in ("waiting", "preempted") and running < self.max_num_seqs:
                self._seat(sequence)
            if sequence.state == "prefill" and budget > 0:
                budget -= self._prefill(sequence, budget)
            elif sequence.state == "decode":
                self._decode(sequence)
        self._totals["steps"] += self._tokens_per_frame

    def _arrive(self) -> None:
        self._num_made += 1
        user = self._draw.choice(_USERS)
        self._sequences.append(
            _Sequence(
                request_id=f"{self._draw.getrandbits(64):016x}",
                user=user,
                priority=-10 if user == "batch" else self._draw.choice((0, 0, 0, 20)),
                num_prompt_tokens=self._draw.randint(*self._prompt_tokens),
                max_tokens=self._draw.randint(40, 400),
                preview=self._draw.choice(_PROMPTS) if user != "root" else "",
                # The first ones have been here for a while, or all would do everything at once.
                arrival_s=self._time_s - (self._draw.uniform(0, 4) if self._seq == 1 else 0),
            )
        )

    def _seat(self, sequence: _Sequence) -> None:
        sequence.state = "prefill"
        self._totals["queries"] += sequence.num_prompt_tokens
        prefix = self._prefix.get(sequence.user, [])
        is_there = all(self._ref_counts[block] or block in self._cached for block in prefix)
        if prefix and is_there and len(prefix) * BLOCK_SIZE < sequence.num_prompt_tokens:
            for block in prefix:
                self._cached.pop(block, None)
                self._ref_counts[block] += 1
            sequence.table = list(prefix)
            sequence.num_cached_tokens = sequence.num_computed_tokens = len(prefix) * BLOCK_SIZE
            self._totals["hits"] += sequence.num_cached_tokens

    def _prefill(self, sequence: _Sequence, budget: int) -> int:
        chunk = min(budget, self._chunk_tokens, sequence.num_prompt_tokens - sequence.num_computed_tokens)
        if not self._compute(sequence, chunk):
            return 0
        self._totals["prompt"] += chunk
        if sequence.num_computed_tokens >= sequence.num_prompt_tokens:
            sequence.state = "decode"
            sequence.first_token_s = self._time_s - sequence.arrival_s
            self._prefix.setdefault(sequence.user, sequence.table[:5])
        return chunk

    def _decode(self, sequence: _Sequence) -> None:
        num_tokens = min(self._tokens_per_frame, sequence.max_tokens - sequence.num_output_tokens)
        if not self._compute(sequence, num_tokens):
            return
        sequence.num_output_tokens += num_tokens
        self._totals["generation"] += num_tokens
        if sequence.num_output_tokens >= sequence.max_tokens:
            self._sequences.remove(sequence)
            self._release(sequence, keep_tokens=sequence.num_computed_tokens)
            if self._draw.random() < 0.2:
                self._note("cancel", f"cancelled by {sequence.user}", sequence.request_id)

    def _compute(self, sequence: _Sequence, num_tokens: int) -> bool:
        goal = sequence.num_computed_tokens + num_tokens
        while len(sequence.table) * BLOCK_SIZE < goal:
            block = self._take()
            if block is None:
                self._preempt(sequence)
                return False
            sequence.table.append(block)
        for logical in range(sequence.num_computed_tokens // BLOCK_SIZE, len(sequence.table)):
            self._fills[sequence.table[logical]] = max(0, min(BLOCK_SIZE, goal - logical * BLOCK_SIZE))
        sequence.num_computed_tokens = goal
        return True

    def _take(self) -> int | None:
        if self._free:
            block = self._free.popleft()
        elif self._cached:
            block = min(self._cached, key=lambda block: self._cached[block])
            del self._cached[block]
            self._totals["evictions"] += 1
            if self._totals["evictions"] % 64 == 1:
                self._note("eviction", "64 cached blocks were given up for new tokens")
        else:
            return None
        self._prefix = {user: prefix for user, prefix in self._prefix.items() if block not in prefix}
        self._ref_counts[block] = 1
        return block

    def _preempt(self, sequence: _Sequence) -> None:
        self._release(sequence, keep_tokens=0)
        sequence.state = "preempted"
        sequence.table, sequence.num_computed_tokens = [], 0
        sequence.num_preemptions += 1
        self._totals["preemptions"] += 1
        self._note("preemption", "no block was free; computed again later", sequence.request_id)

    def _release(self, sequence: _Sequence, keep_tokens: int) -> None:
        for logical, block in reversed(list(enumerate(sequence.table))):
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if (logical + 1) * BLOCK_SIZE <= keep_tokens:
                self._cached[block] = self._time_s
            else:
                self._fills[block] = 0
                self._free.appendleft(block)

    def _note(self, kind: str, reason: str, request_id: str = "") -> None:
        seq = self._events[-1].seq + 1 if self._events else 1
        self._events.append(Event(seq=seq, time_s=self._time_s, kind=kind, reason=reason, request_id=request_id))

    def _row(self, sequence: _Sequence) -> RequestRow:
        return RequestRow(
            request_id=sequence.request_id,
            index=0,
            user=sequence.user,
            state=sequence.state,
            priority=sequence.priority,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            num_computed_tokens=sequence.num_computed_tokens,
            num_output_tokens=sequence.num_output_tokens,
            num_blocks=len(sequence.table),
            num_preemptions=sequence.num_preemptions,
            age_s=self._time_s - sequence.arrival_s,
            first_token_s=sequence.first_token_s,
            block_table=list(sequence.table),
            model="SmolLM2-135M",
            preview=sequence.preview,
        )

    def _map(self) -> BlockMap:
        states = bytearray(2 if count else 0 for count in self._ref_counts)
        ages = bytearray(self.num_blocks)
        for block, used_s in self._cached.items():
            states[block] = 1
            ages[block] = int(self._time_s - used_s).bit_length()
        return BlockMap(
            block_size=BLOCK_SIZE,
            states=bytes(states),
            ref_counts=bytes(self._ref_counts),
            fills=bytes(self._fills),
            ages=bytes(ages),
        )

    def _figures(self) -> dict[str, float | None]:
        states = [sequence.state for sequence in self._sequences]
        used = sum(count > 0 for count in self._ref_counts)
        held = {block for sequence in self._sequences for block in sequence.table}
        live = sum(self._fills[block] for block in held)
        running = states.count("decode") + states.count("prefill")
        waiting = [sequence for sequence in self._sequences if sequence.state in ("waiting", "preempted")]
        fill = live / (used * BLOCK_SIZE) if used else None
        return {
            "num_blocks": self.num_blocks,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": 512,
            "max_model_len": 8192,
            "num_blocks_free": self.num_blocks - used - len(self._cached),
            "num_blocks_cached": len(self._cached),
            "num_blocks_used": used,
            "num_requests_running": running,
            "num_requests_waiting": len(waiting),
            "oldest_wait_s": max((self._time_s - sequence.arrival_s for sequence in waiting), default=0.0),
            "num_scheduled_tokens": running + 96,
            "kv_usage": used / self.num_blocks,
            "slot_fill": fill,
            "fragmentation": None if fill is None else 1 - fill,
            "contiguous_fragmentation": 1 - live / (running * 8192) if running else None,
            "hit_rate": self._totals["hits"] / self._totals["queries"] if self._totals["queries"] else None,
            "generation_tokens_total": self._totals["generation"],
            "prompt_tokens_total": self._totals["prompt"],
            "evictions_total": self._totals["evictions"],
            "preemptions_total": self._totals["preemptions"],
            "steps_total": self._totals["steps"],
            "first_token_seconds_p50": 0.0842,
            "first_token_seconds_p95": 0.21,
            "inter_token_seconds_p50": 0.0191,
            "inter_token_seconds_p99": 0.0413,
            "engine_cpu_cores": 1.94,
            "engine_rss_bytes": 1.3 * 2**30,
            "energy_joules_per_token": 0.66 if self.num_devices else None,
            "cost_per_million_prompt_tokens": 0.0213 if self.num_devices else None,
            "cost_per_million_output_tokens": 0.84 if self.num_devices else None,
        }

    def _machine(self) -> Machine:
        devices = [
            Device(
                index=index,
                name="RTX 4070",
                utilization_percent=92.0 - 9 * index,
                memory_used_bytes=6.1 * 2**30,
                memory_total_bytes=8 * 2**30,
                power_w=148.0,
                temperature_c=71.0,
                clock_mhz=1980.0,
                others=[("firefox", 0.4 * 2**30)],
            )
            for index in range(self.num_devices)
        ]
        return Machine(
            cpu_percent=87.0,
            memory_used_bytes=9.3 * 2**30,
            memory_total_bytes=24 * 2**30,
            temperature_c=58.0,
            num_cores=8,
            devices=devices,
        )
