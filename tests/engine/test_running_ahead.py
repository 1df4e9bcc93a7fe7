"""Steps that are formed before the one before them is back, on a device that finishes each as late as it can."""

import random
from pathlib import Path

import pytest

from pagedd.engine.config import EngineConfig
from pagedd.engine.create import create_engine
from pagedd.engine.request import Request
from pagedd.engine.sampling_params import SamplingParams

from .conftest import Bench, cold_output
from .late_runner import Ahead


def write_to_disk(folder: Path, prompts: list[list[int]]) -> None:
    bench = Bench(disk=folder, num_blocks=100)
    for number, prompt in enumerate(prompts):
        bench.add(str(number), prompt, max_tokens=1)
    bench.run()
    bench.write_to_disk()
    assert bench.disk is not None
    bench.disk.close()


def until_stop(prompt: list[int], max_tokens: int, stops: tuple[int, ...] = ()) -> list[int]:
    tokens = cold_output(prompt, max_tokens)
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


def test_the_next_step_is_launched_before_the_one_before_is_back() -> None:
    ahead = Ahead()
    ahead.add("a", [1, 2, 3], max_tokens=5)
    ahead.add("b", [4, 5], max_tokens=3)
    ahead.drain()
    assert ahead.device.most_on_its_way == 2
    assert ahead.tokens == {"a": until_stop([1, 2, 3], 5), "b": until_stop([4, 5], 3)}


def test_no_step_is_launched_for_sequences_that_are_certain_to_end() -> None:
    ahead = Ahead()
    ahead.add("a", [1, 2, 3], max_tokens=1)
    ahead.step()
    assert ahead.reasons == {"a": "length"}
    assert not ahead.engine.has_work


@pytest.mark.parametrize(("host_slots", "has_disk"), [(0, False), (3, False), (20, False), (0, True), (3, True)])
@pytest.mark.parametrize("seed", range(30))
def test_answers_equal_those_of_an_engine_that_waits(
    seed: int, host_slots: int, has_disk: bool, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    prompts = [[draw.randrange(3) for _ in range(draw.randint(1, 14))] for _ in range(24)]
    if has_disk:
        write_to_disk(tmp_path, draw.sample(prompts, 12))
    ahead = Ahead(
        disk=tmp_path if has_disk else None,
        holds_reads=True,
        num_blocks=draw.choice([8, 12, 40]),
        max_num_seqs=draw.choice([2, 5]),
        max_num_batched_tokens=12,
        host_slots=host_slots,
        lookahead=draw.choice([0, 4]),
    )
    wanted: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        name = str(number)
        max_tokens, stops = draw.randint(1, 9), tuple(draw.sample(range(9), 2))
        ahead.add(name, prompt, max_tokens, priority=draw.choice([-50, 0, 50]), stop_token_ids=stops)
        wanted[name] = until_stop(prompt, max_tokens, stops)
        ahead.bench.now += draw.random()
        if draw.random() < 0.1:
            draw.choice([ahead.device.launch_faults, ahead.device.result_faults]).append(RuntimeError("kernel"))
        for _ in range(draw.randint(0, 3)):
            ahead.step()
        if ahead.bench.held_reads and draw.random() < 0.7:
            ahead.bench.held_reads.pop(0)()
        if draw.random() < 0.2:
            gone = draw.choice(sorted(wanted))
            if ahead.engine.abort(gone):
                wanted[gone] = ahead.tokens.setdefault(gone, [])
    ahead.drain()
    assert ahead.tokens | {name: [] for name in wanted if name not in ahead.tokens} == wanted
    pool = ahead.bench.blocks.pool
    assert pool.num_free + pool.num_cached == pool.num_blocks
    ahead.device.open_pages.settle()
    assert ahead.device.open_pages.num_used == 0


def test_steps_are_launched_ahead_while_another_sequence_waits_for_the_disk(tmp_path: Path) -> None:
    prompt = [*range(1, 13), 1]
    write_to_disk(tmp_path, [prompt])
    ahead = Ahead(num_blocks=20, disk=tmp_path, holds_reads=True)
    ahead.add("a", [1, 2], max_tokens=12)
    ahead.step()
    ahead.add("b", prompt, max_tokens=2)
    for _ in range(5):
        ahead.step()
    assert (len(ahead.tokens["a"]), ahead.device.most_on_its_way) == (6, 2)
    ahead.bench.held_reads.pop()()
    ahead.drain()
    assert ahead.tokens == {"a": until_stop([1, 2], 12), "b": until_stop(prompt, 2)}
    assert ahead.device.num_loaded == 3


def test_a_step_that_cannot_be_launched_finds_its_loads_in_host_memory_when_it_is_tried_again() -> None:
    ahead = Ahead(num_blocks=8, host_slots=3)
    prompt = [*range(1, 13), 1]
    for name, other in (("a", prompt), ("x", list(range(20, 49)))):
        ahead.add(name, other, max_tokens=1)
        ahead.drain()
    host, blocks = ahead.bench.tiers.host, ahead.bench.blocks
    held = {block.key for block in host.newest_first()}
    assert len(held) == 3
    ahead.add("y", [1], max_tokens=6)
    ahead.step()
    ahead.add("b", prompt, max_tokens=1)
    ahead.device.launch_faults.append(RuntimeError("kernel"))
    ahead.step()  # b's launch fails; what was launched before it comes back
    assert ahead.device.num_loaded == 0
    cached = [entry for i in range(8) if blocks.pool.is_cached(i) and (entry := blocks.prefix_cache.entry(i))]
    assert cached
    for entry in cached:
        assert ahead.bench.tiers.save(blocks.prefix_cache.stored_block(entry), entry.block_id) is None
    ahead.drain()
    assert ahead.device.num_loaded == 3
    assert ahead.tokens["b"] == until_stop(prompt, 1)
    assert ahead.bench.tiers.save(blocks.prefix_cache.stored_block(cached[0]), cached[0].block_id) is not None


def test_an_aborted_sequences_blocks_come_back_when_its_step_has_finished() -> None:
    ahead = Ahead(enable_prefix_caching=False)
    ahead.add("a", [1, 2, 3, 4, 5], max_tokens=9)
    ahead.step()
    assert ahead.device.on_its_way
    ahead.engine.abort("a")
    pool = ahead.bench.blocks.pool
    assert pool.num_used == 2
    ahead.step()
    assert pool.num_used == 0
    assert not ahead.engine.has_work


def test_a_choice_may_be_aborted_while_the_step_that_forks_it_is_on_its_way() -> None:
    ahead = Ahead(num_blocks=20)
    ahead.add("a", [1, 2, 3, 4, 5, 6], max_tokens=3)
    ahead.step()
    ahead.add("x", [1, 2, 3], max_tokens=3, n=3)
    ahead.step()  # x's prompt and the draws of its three choices are on their way
    assert ahead.engine.abort("x", 1)
    while ahead.engine.has_work:
        ahead.engine.step()
        ahead.engine.check_integrity()
    assert ahead.bench.blocks.pool.num_used == 0


def test_a_block_is_cached_only_when_the_step_that_fills_it_is_back() -> None:
    ahead = Ahead()
    ahead.add("a", [1, 2, 3], max_tokens=4)
    ahead.step()  # the token of slot 3 is on its way; its block of 4 will be full
    assert len(ahead.bench.blocks.prefix_cache) == 0
    ahead.step()
    assert len(ahead.bench.blocks.prefix_cache) == 1


def test_an_urgent_arrival_gets_its_blocks_once_the_step_on_its_way_is_back() -> None:
    ahead = Ahead(num_blocks=4, max_num_seqs=1)
    ahead.add("slow", [1, 2, 3], max_tokens=8, priority=-100)
    ahead.step()
    ahead.add("urgent", [4, 5, 6], max_tokens=2, priority=100)
    ahead.drain()
    assert list(ahead.reasons) == ["urgent", "slow"]
    assert ahead.tokens == {"urgent": until_stop([4, 5, 6], 2), "slow": until_stop([1, 2, 3], 8)}


def test_a_preemption_is_told_though_the_step_after_it_is_formed_in_the_same_call() -> None:
    ahead = Ahead(num_blocks=8, max_num_seqs=1)
    ahead.add("slow", [1, 2, 3], max_tokens=8, priority=-100)
    ahead.step()
    ahead.add("urgent", [4, 5, 6], max_tokens=4, priority=100)
    told = []
    while ahead.engine.has_work:
        ahead.step()
        told += ahead.engine.preemptions
    assert [(preemption.request_id, preemption.by_request_id) for preemption in told] == [("slow", "urgent")]


def test_penalties_run_ahead_and_choices_that_begin_together_wait() -> None:
    ahead = Ahead()
    ahead.add("a", [1, 2, 3], max_tokens=4, repetition_penalty=1.5)
    ahead.drain()
    assert ahead.device.most_on_its_way == 2
    ahead.device.most_on_its_way = 0
    ahead.add("b", [1, 2, 3], max_tokens=4, n=2)
    ahead.step()
    assert ahead.device.most_on_its_way == 1


@pytest.mark.parametrize("where", ["launch_faults", "result_faults"])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_failed_step_costs_nothing_but_time(where: str, num_steps: int) -> None:
    ahead = Ahead(num_blocks=20)
    for name, prompt in (("a", [1, 2]), ("b", [3, 4, 5, 6, 7]), ("c", [8])):
        ahead.add(name, prompt, max_tokens=6)
    for _ in range(num_steps):
        ahead.step()
    getattr(ahead.device, where).append(RuntimeError("kernel"))
    ahead.drain()
    assert ahead.tokens == {
        "a": until_stop([1, 2], 6),
        "b": until_stop([3, 4, 5, 6, 7], 6),
        "c": until_stop([8], 6),
    }
    assert ahead.bench.blocks.pool.num_used == 0


def test_the_real_model_gives_the_same_tokens_running_ahead(model_gguf) -> None:
    prompts = [[504, 3575, 282, 4649, 314], list(range(100, 140)), [1, 2, 3]]
    kinds = [
        {"temperature": 0.7, "seed": 5},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0.0},
    ]

    def answers(mode: str) -> dict[str, list[int]]:
        config = EngineConfig(
            model=str(model_gguf), num_blocks=64, async_scheduling=mode, num_speculative_tokens=0, num_threads=1
        )
        engine, _ = create_engine(config, lambda share, what: None)
        assert engine._runner.runs_ahead == (mode == "on")
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=12, **kinds[number])
            engine.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
        tokens: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return tokens

    assert answers("on") == answers("off")


def test_a_step_that_is_given_up_leaves_no_page_open_for_what_it_did_not_compute() -> None:
    ahead = Ahead(num_blocks=200, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=400)
    first, urgent = [i % 7 for i in range(380)], [(i * 3 + 1) % 5 for i in range(200)]
    ahead.add("first", first, 2, priority=-100)
    ahead.device.result_faults.append(RuntimeError("kernel"))
    ahead.step()  # its first chunk fails while its second is on its way
    ahead.add("urgent", urgent, 2, priority=100)
    ahead.drain()
    assert ahead.tokens == {"first": until_stop(first, 2), "urgent": until_stop(urgent, 2)}
