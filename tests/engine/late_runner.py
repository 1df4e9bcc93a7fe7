"""A device that finishes each step as late as it can, and an engine on it whose every step is checked."""

from dataclasses import dataclass

from pagedd.engine.kv.stored_block import BlockCopy
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams
from pagedd.engine.sequence import PENDING, Sequence
from pagedd.engine.step import LaunchedStep, Sampled, ScheduledSequence, Step

from .conftest import Bench, TokenRunner, next_token


@dataclass
class Told:
    """Of one scheduled sequence. `pages`: where the keys of the blocks that it writes to are kept, by logical index."""

    sequence: Sequence
    start: int
    token_ids: list[int]
    table: list[int]
    choices: list[int]
    pages: dict[int, int]


@dataclass
class Launched:
    """What the device was told: everything is copied at the launch, as a kernel's arguments are."""

    device: "LateRunner"
    items: "list[Told]"
    copies: list[tuple[int, int]]
    page_copies: list[tuple[int, int]]
    saves: list[BlockCopy]
    loads: list[BlockCopy]
    sampled: list[Sampled] | None = None
    fault: Exception | None = None
    has_failed: bool = False
    is_given_up: bool = False  # a step before it failed on the device

    def result(self) -> list[Sampled]:
        self.device.compute_until(self)
        if self.fault is not None:
            raise self.fault
        assert self.sampled is not None
        return self.sampled

    @property
    def blocks(self) -> set[int]:
        return {block for told in self.items for block in told.table}


class LateRunner(TokenRunner):
    """Computes a launched step only when somebody waits for it, which is after the next one was launched."""

    runs_ahead = True

    def __init__(self, num_blocks: int, block_size: int, num_pages: int) -> None:
        super().__init__(num_blocks, block_size, num_pages)
        self.on_its_way: list[Launched] = []
        self.launch_faults: list[Exception] = []
        self.result_faults: list[Exception] = []
        self.most_on_its_way = 0
        self.has_read_wrong_keys = False
        self._drawn: dict[Sequence, int] = {}

    def launch(self, step: Step) -> LaunchedStep:
        launched = Launched(self, [], [], [], [], [])
        launched.fault = self.launch_faults.pop() if self.launch_faults else None
        launched.has_failed = launched.fault is not None
        if not launched.has_failed:
            opened = self.open_pages
            sources = [(opened.find(source), target) for source, target in step.block_copies]
            launched.page_copies = [(page, opened.open(target)) for page, target in sources if page is not None]
            opened.settle()
            launched.items = [self._told(item) for item in step.scheduled]
            for told, copies in (
                (launched.copies, step.block_copies),
                (launched.saves, step.block_saves),
                (launched.loads, step.block_loads),
            ):
                told += copies
                copies.clear()
        self.on_its_way.append(launched)
        self.most_on_its_way = max(self.most_on_its_way, len(self.on_its_way))
        return launched

    def compute_until(self, last: Launched) -> None:
        while last in self.on_its_way:
            launched = self.on_its_way.pop(0)
            self._copy(launched)
            for source, target in launched.page_copies:
                self.pages[target] = list(self.pages[source])
            if self.result_faults:
                launched.fault = self.result_faults.pop()
            if launched.fault is None:
                launched.sampled = self._compute(launched)
            else:
                self._drawn = {}
                for later in self.on_its_way:
                    later.is_given_up = True

    def _copy(self, launched: Launched) -> None:
        super().save_blocks(launched.saves)
        size = self.block_size
        for source, target in launched.copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        self.load_blocks(launched.loads)
        launched.saves, launched.copies, launched.loads = [], [], []

    def save_blocks(self, copies: list[BlockCopy]) -> None:
        """As on a GPU: in a stream of its own, which waits only for the copies of what was launched before."""
        for launched in self.on_its_way:
            self._copy(launched)
        super().save_blocks(copies)

    def _told(self, item: ScheduledSequence) -> Told:
        table, end = list(item.sequence.block_table), item.start + item.num_scheduled_tokens
        written = range(item.start // self.block_size, (end - 1) // self.block_size + 1)
        pages = {logical: self.open_pages.open(table[logical]) for logical in written}
        choices = [sampler.choice_index for sampler in item.samplers]
        return Told(item.sequence, item.start, list(item.token_ids), table, choices, pages)

    def _compute(self, launched: Launched) -> list[Sampled]:
        size, sampled, drawn = self.block_size, [], {}
        for told in launched.items:
            for i, token_id in enumerate(told.token_ids, told.start):
                known = self._drawn[told.sequence] if token_id == PENDING else token_id
                self.slots[told.table[i // size] * size + i % size] = known
                self.pages[told.pages[i // size]][i % size] = known
        for told in launched.items:
            end = told.start + len(told.token_ids)
            context = [self.slots[told.table[i // size] * size + i % size] for i in range(end)]
            self.has_read_wrong_keys |= self._keys(told, end) != context and not launched.is_given_up
            for choice in told.choices:
                drawn[told.sequence] = next_token(context, choice)
                sampled.append(Sampled(drawn[told.sequence]))
        self._drawn = drawn
        return sampled

    def _keys(self, told: Told, end: int) -> list[int | None]:
        """Of the tokens before `end`: those of full blocks as they were closed, the others from their pages."""
        size = self.block_size
        for logical, page in told.pages.items():
            if (logical + 1) * size <= end:
                self.closed[told.table[logical]] = list(self.pages[page])
        keys = [self.closed.get(block, []) for block in told.table[: end // size]]
        keys += [self.pages[told.pages[end // size]][: end % size]] if end % size else []
        return [key for block in keys for key in block]


class Ahead:
    """An engine on a late device; checks after each step that no block of a launched step is anybody else's to take."""

    def __init__(self, **settings: object) -> None:
        self.bench = Bench(num_speculative_tokens=0, runner=LateRunner, **settings)  # type: ignore[arg-type]
        assert isinstance(self.bench.runner, LateRunner)
        self.device = self.bench.runner
        self.engine = self.bench.engine
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int = 4, priority: int = 0, **params: object) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        self.engine.add(Request(request_id=name, prompt_token_ids=prompt, params=sampling, priority=priority))

    def step(self) -> None:
        for output in self.engine.step():
            assert output.request_id not in self.reasons, "a request ended twice"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason
        self.engine.after_step()
        pool = self.bench.blocks.pool
        for launched in self.device.on_its_way:
            assert all(pool.ref_count(block) for block in launched.blocks), "a launched step's block is in the pool"
        assert not self.device.has_read_wrong_keys
        self.engine.check_integrity()

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()
            while self.bench.held_reads:
                self.bench.held_reads.pop(0)()
