"""A model made of arithmetic, so that engine tests need no weights: it keeps token ids where a real one keeps KV.

And, for what needs weights, tiny random models on disk.
"""

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from pagedd.engine.config import SchedulerConfig
from pagedd.engine.engine import Engine
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.kv.copy_costs import CopyCosts
from pagedd.engine.kv.disk_segment import SegmentForm
from pagedd.engine.kv.disk_thread import DiskThread
from pagedd.engine.kv.disk_tier import DiskTier
from pagedd.engine.kv.host_tier import HostTier
from pagedd.engine.kv.open_pages import OpenPages, num_pages_for
from pagedd.engine.kv.prefix_cache import Hasher, blake2b_digest
from pagedd.engine.kv.stored_block import BlockCopy
from pagedd.engine.kv.tiers import Tiers
from pagedd.engine.request import Request, SequenceOutput
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.scheduler import Scheduler
from pagedd.engine.step import Runner, Sampled, Step

VOCAB = 50


def next_token(context: list[int], choice_index: int) -> int:
    """What the arithmetic model draws after `context`: by its last two tokens, so that texts fall into loops."""
    return zlib.crc32(bytes(context[-2:]) + bytes([choice_index])) % VOCAB % 9


class TokenRunner(Runner):
    """Writes token ids into slots and reads the whole context back through the block table, as attention would.

    With `num_pages` it also keeps them as a cache with open keys does: in a page until their block is full, and from
    then on as what the page held.
    """

    def __init__(self, num_blocks: int, block_size: int, num_pages: int = 0) -> None:
        self.block_size = block_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.open_pages = OpenPages(num_pages)
        self.pages: dict[int, list[int | None]] = {page: [None] * block_size for page in range(num_pages)}
        self.closed: dict[int, list[int | None]] = {}
        super().__init__()
        self.num_computed = 0
        self.copied: list[tuple[int, int]] = []  # every block copy so far
        self.num_loaded = 0

    def save_blocks(self, copies: list[BlockCopy]) -> None:
        """A byte a slot, as `read_block`."""
        for block_id, memory in copies:
            memory[:] = self.read_block(block_id)

    def read_block(self, block_id: int) -> bytearray:
        slots = self.slots[block_id * self.block_size : (block_id + 1) * self.block_size]
        return bytearray(255 if slot is None else slot for slot in slots)

    def load_blocks(self, copies: list[BlockCopy]) -> None:
        for block_id, memory in copies:
            self.slots[block_id * self.block_size : (block_id + 1) * self.block_size] = memory
            self.closed[block_id] = list(memory)
            self.num_loaded += 1

    def run(self, step: Step) -> list[Sampled]:
        size = self.block_size
        self.save_blocks(step.block_saves)
        step.block_saves.clear()
        for source, target in step.block_copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        self.copied += step.block_copies
        self.load_blocks(step.block_loads)
        step.block_loads.clear()
        if self.pages:
            self.write_keys(step)
        step.block_copies.clear()
        for item in step.scheduled:
            for i, token_id in enumerate(item.token_ids, item.start):
                self.slots[item.sequence.block_table[i // size] * size + i % size] = token_id
                self.num_computed += 1
        sampled = []
        for item in step.scheduled:
            end, table = item.start + item.num_scheduled_tokens, item.sequence.block_table
            context = [self.slots[table[i // size] * size + i % size] for i in range(end)]
            if context != item.sequence.token_ids[: item.start] + item.token_ids:
                raise AssertionError(f"{context} was read through the block table, other tokens were written")
            num_guesses = len(item.draft_token_ids)
            for row in range(end - num_guesses, end):
                sampled.append(Sampled(next_token(context[:row], item.sequence.choice_index)))
            sampled += [Sampled(next_token(context, s.choice_index)) for s in item.samplers]
        return sampled

    def write_keys(self, step: Step) -> None:
        """Of open blocks, and holds what each new token would see to the tokens themselves."""
        size, opened = self.block_size, self.open_pages
        copies = [(opened.find(source), target) for source, target in step.block_copies]
        for source, target in copies:
            if source is not None:
                self.pages[opened.open(target)] = list(self.pages[source])
        opened.settle()
        for item in step.scheduled:
            table, end = item.sequence.block_table, item.start + item.num_scheduled_tokens
            for i, token_id in enumerate(item.token_ids, item.start):
                self.pages[opened.open(table[i // size])][i % size] = token_id
            for logical in range(item.start // size, end // size):
                page = opened.find(table[logical])
                assert page is not None
                self.closed[table[logical]] = list(self.pages[page])
            tokens = item.sequence.token_ids[: item.start] + item.token_ids
            for position in range(item.start, end):
                page = opened.find(table[position // size])
                assert page is not None
                own = self.pages[page][: position % size + 1]
                before = [token for block in table[: position // size] for token in self.closed[block]]
                assert before + own == tokens[: position + 1]


class HeldDiskThread(DiskThread):
    """Begins when the test calls what is in `held`, but removes files at once."""

    def __init__(self, held: list[Callable[[], None]]) -> None:
        super().__init__(held.append)
        self._held = held

    def ask(self, jobs: Iterable[Callable[[], None]], *, is_urgent: bool = False) -> None:
        if is_urgent:
            for job in jobs:
                job()
        else:
            super().ask(jobs)

    def finish(self, limit_s: float) -> None:
        while self._held:
            self._held.pop(0)()


class Bench:
    """A scheduler on the arithmetic model, with a clock that only the test moves.

    Args:
        host_slots: blocks that the host tier has room for.
        disk: directory of a disk tier, with room for about `disk_blocks`.
        holds_reads: the disk answers when the test has it answer (`answer_reads`), or nothing else can be done.
        runner: the kind of device.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 6,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 64,
        hasher: Hasher = blake2b_digest,
        host_slots: int = 0,
        disk: Path | None = None,
        disk_blocks: int = 1000,
        holds_reads: bool = False,
        lookahead: int = 0,
        runner: type[TokenRunner] = TokenRunner,
        **settings: object,
    ) -> None:
        config = SchedulerConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            **settings,  # type: ignore[arg-type]
        )
        self.now = 0.0
        # A block's bytes are its token ids.
        form = SegmentForm(bytes(32), block_size, block_size)
        self.held_reads: list[Callable[[], None]] = []
        thread = HeldDiskThread(self.held_reads) if holds_reads else None
        self.disk = None if disk is None else DiskTier(disk, form.file_bytes(disk_blocks), form, thread=thread)
        host = HostTier(memoryview(bytearray(host_slots * block_size)), block_size) if host_slots else None
        self.tiers = Tiers(host, self.disk, CopyCosts(block_size), lookahead=lookahead)
        num_pages = num_pages_for(
            max_num_batched_tokens,
            block_size,
            max_num_seqs,
            num_guesses=config.num_speculative_tokens,
            runs_ahead=runner.runs_ahead,
        )
        self.runner = runner(num_blocks, block_size, num_pages)
        self.blocks = BlockManager(
            num_blocks,
            block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            hasher=hasher,
            tiers=self.tiers if host or self.disk else None,
            clock=lambda: self.now,
            open_pages=self.runner.open_pages,
        )
        self.scheduler = Scheduler(config, self.blocks, clock=lambda: self.now)
        self.engine = Engine(self.runner, self.scheduler, clock=lambda: self.now)
        self.writer = self.engine._disk_writer
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], SequenceOutput] = {}

    def add(
        self, request_id: str, prompt: list[int], max_tokens: int = 4, priority: int = 0, extras=(), **params: object
    ) -> None:
        self.scheduler.add(
            Request(
                request_id=request_id,
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
                priority=priority,
                cache_extras=extras,
            )
        )

    def step(self) -> Step:
        step = self.scheduler.schedule()
        while not step.scheduled and self.blocks.reads:
            self.answer_reads()
            step = self.scheduler.schedule()
        return self.finish(step)

    def finish(self, step: Step) -> Step:
        """Computes what was scheduled, and takes it in."""
        for output in self.scheduler.commit(step, self.runner.run(step)):
            key = (output.request_id, output.choice_index)
            assert key not in self.finished, "a choice ended twice"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.finished[key] = output
        self.tiers.settle(step.block_saves, step.block_loads)
        self.engine.after_step()
        self.scheduler.check_integrity()
        return step

    def answer_reads(self) -> None:
        """Waits for the disk, as an engine does that has nothing to compute."""
        if self.held_reads:
            self.held_reads.pop(0)()
        self.blocks.await_reads(1.0)

    def write_to_disk(self) -> None:
        """What an engine does when it is idle for long, or told to end."""
        assert self.writer is not None
        self.writer.note_change()
        self.writer.write_all(60)

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is live."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            assert self.step().scheduled, "a step in which nothing advances"
        raise AssertionError("the requests do not end")

    def output(self, request_id: str, choice_index: int = 0) -> list[int]:
        return self.tokens.get((request_id, choice_index), [])

    def num_cached(self, request_id: str) -> int:
        return self.finished[request_id, 0].num_cached_tokens


def cold_output(prompt: list[int], max_tokens: int, choice_index: int = 0) -> list[int]:
    """What a fresh engine without prefix caching answers."""
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(context, choice_index))
    return context[len(prompt) :]


def save_random_model(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **settings: object) -> None:
    """A model of transformers of two layers and random weights, the same ones each time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, num_hidden_layers=2, dtype=dtype, **settings)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return Bench


@pytest.fixture(params=["no tier", "host", "disk"])
def bench_before_tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Bench]:
    """`bench` before each tier, with room for a few blocks, unless a test says what it wants."""
    numbers = itertools.count()

    def make(**settings: object) -> Bench:
        tier: dict[str, object] = {}
        if request.param == "host":
            tier = {"host_slots": 20, "lookahead": 3}
        elif request.param == "disk":
            tier = {"disk": tmp_path / str(next(numbers))}
        return Bench(**(tier | settings))  # type: ignore[arg-type]

    return make


@pytest.fixture
def nothing_can_be_removed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """A context in which the disk removes no file."""

    @contextmanager
    def refusing() -> Iterator[None]:
        def refuse(path: Path, missing_ok: bool = False) -> None:
            raise PermissionError(path.name)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refuse)
            yield

    return refusing


@pytest.fixture
def cold() -> Callable[..., list[int]]:
    return cold_output
