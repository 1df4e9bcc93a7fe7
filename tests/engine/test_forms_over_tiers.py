"""Every form of the cache before every tier, through the engine as it is made from settings, on a tiny random model.

With one thread a token's numbers do not depend on what is computed with it, so every answer has to be, to the last
token, that of an engine without prefix caching: from the pool, from a tier, after a restart, after a preemption.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pagedd.engine.config import EngineConfig
from pagedd.engine.create import create_engine
from pagedd.engine.engine import Engine
from pagedd.engine.errors import EngineError
from pagedd.engine.kv.copy_costs import CopyCosts
from pagedd.engine.kv.disk_tier import DiskTier
from pagedd.engine.model.load import LoadedModel, load_model
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams

from .conftest import save_random_model

FORMS = ("auto", "fp8", "int8", "k8v4", "int4")  # auto is bf16 here: the weights are
TIERS = ("none", "host", "disk")
VOCAB, SIZE = 60, 16
NUM_BLOCKS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random_model(
        folder,
        "llama",
        torch.bfloat16,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=192,
        initializer_range=0.4,
        eos_token_id=VOCAB - 1,
    )
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path, cpu_extension: object) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), device="cpu"), lambda share, what: None)


@pytest.fixture(autouse=True)
def copies_are_always_worth_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So small a model is computed about as quickly as it is copied."""
    monkeypatch.setattr(CopyCosts, "max_saves", lambda self: math.inf)
    monkeypatch.setattr(CopyCosts, "max_loads", lambda self, *, from_disk: math.inf)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Life:
    """One engine after another with the same settings, and what all of them answered."""

    def __init__(self, create: Callable[[], Engine]) -> None:
        self._create = create
        self.engine = create()
        self.answers: dict[tuple[str, int], list[int]] = defaultdict(list)  # (request, choice) → tokens
        self.num_cached: dict[str, int] = {}

    def add(
        self, name: str, prompt: list[int], max_tokens: int = 4, *, n: int = 1, priority: int = 0, extras=()
    ) -> None:
        draws = {"temperature": 0.8, "seed": 5} if n > 1 else {"temperature": 0.0}
        params = SamplingParams(max_tokens=max_tokens, n=n, **draws)
        self.engine.add(
            Request(request_id=name, prompt_token_ids=prompt, params=params, priority=priority, cache_extras=extras)
        )

    def step(self) -> None:
        for output in self.engine.step():
            assert output.error_code is None
            self.answers[output.request_id, output.choice_index] += output.token_ids
            self.num_cached[output.request_id] = output.num_cached_tokens
        self.engine.after_step()
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats.num_blocks_free + stats.num_blocks_cached + stats.num_blocks_used == stats.num_blocks

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        assert self.engine.stats().num_blocks_used == 0

    def ask(self, name: str, prompt: list[int], max_tokens: int = 4, *, n: int = 1, extras=()) -> list[list[int]]:
        """All choices."""
        self.add(name, prompt, max_tokens, n=n, extras=extras)
        self.run()
        return [self.answers[name, choice] for choice in range(n)]

    def evict_everything(self) -> None:
        """Other prompts fill the pool; what it held lies in the tier, if there is one."""
        if self.engine._disk_writer is not None:
            self.engine._disk_writer.write_all(60)
        self.ask(f"other{len(self.answers)}", [len(self.answers) % VOCAB, *text(99, NUM_BLOCKS * SIZE - 2)], 1)

    def restart(self) -> None:
        self.engine.close(60)
        if (disk := self.disk) is not None:
            disk.close()
        self.engine = self._create()

    @property
    def disk(self) -> DiskTier | None:
        tiers = self.engine._scheduler.blocks.tiers
        return None if tiers is None else tiers.disk

    @property
    def num_promoted(self) -> int:
        """Blocks, of the engine that is there."""
        return sum(tier.promotions_total for tier in self.engine.stats().kv_tiers.values())


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def begin(folder: Path, loaded: LoadedModel, form: str, tmp_path: Path) -> Callable[..., Life]:
    """`begin(tier)`: a life whose pool is empty; `None` for an engine without prefix caching."""

    def create(tier: str | None, settings: dict[str, object]) -> Engine:
        config = EngineConfig(
            model=str(folder),
            device="cpu",
            kv_cache_dtype=form,
            block_size=SIZE,
            num_threads=1,
            num_speculative_tokens=0,  # attention over several rows of a sequence rounds in another order
            enable_prefix_caching=tier is not None,
            kv_host_gib=2**-10 if tier == "host" else 0.0,
            kv_disk_gib=2**-10 if tier == "disk" else 0.0,
            kv_disk_directory=str(tmp_path / "kv"),
            **({"num_blocks": NUM_BLOCKS, "max_num_batched_tokens": 64} | settings),  # type: ignore[arg-type]
        )
        return create_engine(config, lambda share, what: None, lambda config, progress: loaded)[0]

    return lambda tier, **settings: Life(lambda: create(tier, settings))


@pytest.fixture
def cold(begin: Callable[..., Life]) -> Callable[..., list[list[int]]]:
    """What an engine without prefix caching answers, in the same form."""
    life, known = begin(None), {}

    def answer(prompt: list[int], max_tokens: int = 4, *, n: int = 1) -> list[list[int]]:
        asked = (tuple(prompt), max_tokens, n)
        if asked not in known:
            known[asked] = life.ask(str(asked), prompt, max_tokens, n=n)
        return known[asked]

    return answer


def text(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB - 1) for _ in range(length)]


def test_prompts_at_every_border_of_a_block_are_answered_from_anywhere_as_cold(begin, cold, form, tier) -> None:
    life = begin(tier)
    lengths = (1, 15, 16, 17, 31, 32, 33)
    for length in lengths:
        for time in range(2):
            assert life.ask(f"{length}-{time}", text(length, length)) == cold(text(length, length))
            assert life.num_cached[f"{length}-{time}"] == (time and (length - 1) // SIZE * SIZE)
    life.evict_everything()
    for length in lengths:
        assert life.ask(f"{length}-late", text(length, length)) == cold(text(length, length))
        assert life.num_cached[f"{length}-late"] == (0 if tier == "none" else (length - 1) // SIZE * SIZE)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_drawn_token_whose_numbers_were_never_computed_is_in_no_block(begin, cold, form, tier, max_tokens) -> None:
    life, prompt = begin(tier), text(1, 15)
    (drawn,) = life.ask("first", prompt, max_tokens)
    tail = text(2, 20)
    for name, next_id in (("same", drawn[0]), ("other", (drawn[0] + 1) % VOCAB)):
        going_on = [*prompt, next_id, *tail]
        assert life.ask(name, going_on) == cold(going_on)
        assert life.num_cached[name] == (SIZE if name == "same" and max_tokens == 2 else 0)


def test_choices_are_the_same_from_a_tier_and_after_a_restart(begin, cold, form, tier) -> None:
    """The prompt ends inside a block: its choices share that, and copy it when they write."""
    life, prompt = begin(tier), text(1, 4 * SIZE + 5)
    wanted = cold(prompt, 14, n=2)
    assert wanted[0] != wanted[1]
    assert life.ask("first", prompt, 14, n=2) == wanted
    life.evict_everything()
    assert life.ask("evicted", prompt, 14, n=2) == wanted
    assert life.num_cached["evicted"] == life.num_promoted * SIZE == (0 if tier == "none" else 4 * SIZE)
    life.restart()
    assert life.ask("restarted", prompt, 14, n=2) == wanted
    assert life.num_cached["restarted"] == life.num_promoted * SIZE == (4 * SIZE if tier == "disk" else 0)


def test_after_a_few_evictions_the_hit_is_the_unbroken_run_that_is_left(begin, cold, form, tier) -> None:
    life, prompt = begin(tier), text(1, 4 * SIZE + 1)
    life.ask("first", prompt, 1)
    if life.disk is not None:
        life.engine._disk_writer.write_all(60)
    life.ask("other", text(2, (NUM_BLOCKS - 2) * SIZE - 1), 1)
    num_left = 2  # the tail went first
    assert life.ask("again", prompt) == cold(prompt)
    assert life.num_cached["again"] == (num_left if tier == "none" else 4) * SIZE
    assert life.num_promoted == (0 if tier == "none" else 2)


def test_whoever_loses_its_blocks_goes_on_as_if_it_had_kept_them(begin, cold, form, tier) -> None:
    life = begin(tier, num_blocks=8)
    slow, urgent = text(1, 50), text(2, 100)
    life.add("slow", slow, 24, n=2, priority=-50)
    for _ in range(6):
        life.step()
    life.add("urgent", urgent, 8, priority=50)
    life.run()
    assert life.engine.stats().preemptions_total
    assert [life.answers["slow", choice] for choice in range(2)] == cold(slow, 24, n=2)
    assert [life.answers["urgent", 0]] == cold(urgent, 8)
    assert (life.num_promoted > 0) == (tier == "host")


@pytest.mark.parametrize(("n", "mode"), [(2, "on"), (3, "off")])
def test_a_tail_is_copied_before_its_block_is_loaded_into(begin, cold, form, tier, n, mode) -> None:
    """Who holds the tail that its choices copy loses it in that step, to a prompt that takes it for what a tier has."""
    life = begin(tier, num_blocks=8, async_scheduling=mode)
    urgent, slow, max_tokens = text(2, 49), text(1, 20), {2: 40, 3: 4}[n]
    life.ask("first", urgent, 1)
    if life.disk is not None:
        life.engine._disk_writer.write_all(60)
    life.ask("other", text(99, 126), 1)
    life.add("slow", slow, 12, n=n, priority=-50)
    while not life.answers["slow", 0]:
        life.step()
    life.add("urgent", urgent, max_tokens, priority=50)
    life.run()
    assert life.engine.stats().preemptions_total
    assert [life.answers["urgent", 0]] == cold(urgent, max_tokens)
    assert [life.answers["slow", choice] for choice in range(n)] == cold(slow, 12, n=n)


def test_what_is_being_computed_is_shared_and_outlives_who_began_it(begin, cold, form, tier) -> None:
    life, prompt = begin(tier, max_num_batched_tokens=16), text(1, 8 * SIZE)
    life.add("first", [*prompt, 1])
    for _ in range(3):
        life.step()
    for name in (2, 3):
        life.add(str(name), [*prompt, name])
    life.step()
    assert life.engine.abort("first")
    life.run()
    for name in (2, 3):
        assert [life.answers[str(name), 0]] == cold([*prompt, name])
    assert [life.num_cached["2"], life.num_cached["3"]] == [4 * SIZE, 8 * SIZE]


def test_callers_and_kinds_of_names_stay_apart(begin, cold, form, tier) -> None:
    life, prompt = begin(tier), text(1, 40)
    found = []
    for name, tag in enumerate([("caller", "1"), ("caller", "2"), ("salt", "1"), ("adapter", "1"), ("caller", "1")]):
        assert life.ask(str(name), prompt, extras=(tag,)) == cold(prompt)
        found.append(life.num_cached[str(name)])
        life.evict_everything()
    assert found == [0, 0, 0, 0, 0 if tier == "none" else 2 * SIZE]


def test_a_prompt_larger_than_the_pool_is_refused_with_its_numbers_and_holds_nobody_up(begin, cold, form, tier) -> None:
    life = begin(tier, num_blocks=5)
    with pytest.raises(EngineError, match=r"exceeds_kv_pool: 100 prompt tokens .* need 7 blocks of 16, the pool has 5"):
        life.add("large", text(1, 100))
    assert life.ask("small", text(2, 3)) == cold(text(2, 3))


def test_used_cached_and_free_blocks_and_their_fill_are_told_apart(begin, form, tier) -> None:
    life = begin(tier)
    for name in range(3):
        life.add(str(name), text(name, 17), 2)
    life.step()
    stats = life.engine.stats()
    assert (stats.num_blocks_used, stats.num_blocks_cached, stats.num_blocks_free) == (6, 0, 6)
    assert stats.slot_fill == 17 / 32
    life.run()
    stats = life.engine.stats()
    assert (stats.num_blocks_used, stats.num_blocks_cached, stats.num_blocks_free) == (0, 3, 9)
    assert stats.slot_fill is None


def test_random_lives_leave_nothing_behind_and_answer_as_cold(begin, cold, form, tier) -> None:
    """Digests of 8 bits: what they confuse is told apart by its tokens."""
    draw, life = random.Random(3), begin(tier, max_num_seqs=3)
    life.engine._scheduler.blocks.prefix_cache._hasher = lambda data: bytes([sum(data) % 251])
    asked: dict[str, tuple[list[int], int, int]] = {}
    waiting, aborted = list(range(40)), set()
    while waiting or life.engine.has_work:
        if waiting and draw.random() < 0.4:
            name = str(waiting.pop())
            prompt = text(draw.randrange(3), 80)[: draw.choice([15, 33, 70])] + text(draw.randrange(3), 3)
            asked[name] = prompt, draw.randint(1, 5), draw.choice([1, 1, 1, 2])
            life.add(name, prompt, asked[name][1], n=asked[name][2], priority=draw.choice([0, 0, 100]))
        if draw.random() < 0.08:
            live = [sequence.request.request_id for sequence in life.engine._scheduler.live_sequences()]
            aborted.update(name for name in live[:1] if life.engine.abort(name))
        life.step()
        if not life.engine.has_work and life.disk is not None:
            life.engine._disk_writer.write_all(60)
    life.run()
    for name, (prompt, max_tokens, n) in asked.items():
        if name not in aborted:
            assert [life.answers[name, choice] for choice in range(n)] == cold(prompt, max_tokens, n=n)
    stats = life.engine.stats()
    assert aborted
    assert stats.preemptions_total
    assert stats.prefix_hits_total
    assert (life.num_promoted > 0) == (tier != "none")
