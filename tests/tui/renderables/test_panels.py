"""The panels of the overview as text: one GPU, several, none; and what is not known is said so."""

import msgspec

from pagedd.bench.frames import FakeEngine
from pagedd.client.stats_frame import Device, Machine
from pagedd.tui.glyphs import ASCII, UNICODE
from pagedd.tui.line import Line, text_of, width_of
from pagedd.tui.renderables.batch import batch_lines, batch_row
from pagedd.tui.renderables.cache import cache_bar, cache_figures
from pagedd.tui.renderables.header import Modes, header_line
from pagedd.tui.renderables.machine import machine_lines, machine_row, machine_title
from pagedd.tui.renderables.throughput import throughput_lines, throughput_row
from pagedd.tui.state import Link, State

from ..conftest import NOW_S, played


def texts(lines: list[Line]) -> list[str]:
    return [text_of(line).rstrip() for line in lines]


def with_machine(machine: Machine | None) -> State:
    state = State()
    state.take(msgspec.structs.replace(FakeEngine().frame(), machine=machine), NOW_S)
    return state


def test_a_gpu_has_four_lines() -> None:
    state = played(20)
    assert machine_title(state) == "GPU"
    assert texts(machine_lines(state, 40, 4, UNICODE)) == [
        "util  ▕████████████▉ ▏  92 %",
        "mem   ▕██████████▋   ▏   6.1/8.0 GiB",
        "power  148 W ·  71 °C · 1 980 MHz",
        "others firefox 410 MiB",
    ]
    assert text_of(machine_row(state, 78, UNICODE)) == (
        "gpu   ▕█████████████▊ ▏  92 %  mem ▕███████████▌   ▏  6.1/8.0 GiB   148 W"
    )


def test_a_card_that_tells_nothing_is_no_card_at_zero() -> None:
    state = with_machine(Machine(devices=[Device(index=0)]))
    assert texts(machine_lines(state, 40, 4, UNICODE)) == [
        "util  ▕              ▏   – %",
        "mem   ▕              ▏     –/– GiB",
        "power    – W ·   – °C ·     – MHz",
        "others none",
    ]


def test_several_gpus_have_a_line_each_as_far_as_there_is_room() -> None:
    state = played(20, num_devices=3)
    assert machine_title(state) == "3 GPUs"
    lines = texts(machine_lines(state, 60, 4, UNICODE))
    assert [line.split()[0] for line in lines] == ["0", "1", "2"]
    assert all("6.1/8.0 GiB  148 W  71 °C" in line for line in lines)
    assert len(machine_lines(state, 60, 2, UNICODE)) == 2


def test_without_a_gpu_it_is_the_cpu() -> None:
    state = played(20, num_devices=0)
    assert machine_title(state) == "CPU"
    assert texts(machine_lines(state, 40, 4, ASCII)) == [
        "cpu   [############  ]  87 %",
        "mem   [#####         ]   9.3/24.0 GiB",
        "cores    8,  58 C",
        "engine 1.94 cores, 1.3 GiB",
    ]


def test_a_daemon_that_says_nothing_of_its_machine_is_no_idle_machine() -> None:
    assert texts(machine_lines(with_machine(None), 40, 4, UNICODE))[:3] == [
        "cpu   ▕              ▏   – %",
        "mem   ▕              ▏     –/– GiB",
        "cores    – ·   – °C",
    ]


def test_throughput_prints_its_bounds_and_its_latencies() -> None:
    out, taken, first, gap = texts(throughput_lines(played(40), 46, 4, UNICODE))
    assert out.startswith("out    500▕")
    assert out.endswith(" tok/s")
    assert taken.startswith("in   5 000▕")
    assert first == "first token p50  84.2 ms   p95   210 ms"
    assert gap == "gap         p50  19.1 ms   p99  41.3 ms"


def test_latencies_fit_into_the_narrowest_panel() -> None:
    state = played(40)
    assert state.frame is not None
    state.frame.figures |= {"first_token_seconds_p50": 6.485, "first_token_seconds_p95": 15.0}
    for width in (29, 31, 42, 46):
        first, gap = (text_of(line) for line in throughput_lines(state, width, 4, UNICODE)[2:])
        assert first.endswith("p95    15 s ")
        assert gap.endswith("p99  41.3 ms")


def test_a_taller_panel_has_taller_graphs() -> None:
    assert len(throughput_lines(played(40), 46, 8, UNICODE)) == 8


def test_the_batch_says_seats_tokens_who_waits_and_what_a_token_costs() -> None:
    assert texts(batch_lines(played(40), 44, UNICODE)) == [
        "seats  ▕████████████████████████▏   12/12",
        "tokens ▕█████                   ▏ 108/512",
        "waiting   2 (oldest 1.8 s)  preempted 0",
        "energy 0.66 J/token  0.021/0.84 per M",
    ]
    assert texts(batch_lines(played(40), 64, UNICODE))[3].endswith("  steps   24/s")
    assert texts(batch_lines(played(40, num_devices=0), 44, UNICODE))[3] == "energy    – J/token  steps   24/s"


def test_before_the_first_frame_nothing_is_known() -> None:
    state = State()
    assert texts(batch_lines(state, 44, UNICODE))[2:] == [
        "waiting   –  preempted 0",
        "energy    – J/token  steps    –/s",
    ]
    assert text_of(cache_bar(state, 80, UNICODE)).startswith("– blocks ▕")
    assert text_of(header_line(state, Modes(), NOW_S, 60, UNICODE)).split() == ["pagetop", "○", "connecting"]


def test_the_cache_is_a_bar_of_used_cached_and_free() -> None:
    assert text_of(cache_bar(played(40), 80, UNICODE)) == (
        "1 024 blocks ▕██████████▒▒▒▒▒······▏  █ used  47 %  ▒ cached  23 %  · free  30 %"
    )


def test_figures_are_wrapped_whole() -> None:
    for width in (36, 60, 80, 120, 300):
        lines = texts(cache_figures(played(40), width, UNICODE))
        assert all(len(line) <= width for line in lines)
        assert "of prompt tokens" in " ".join(lines)


def test_no_width_cuts_a_percentage_in_two() -> None:
    state = played(40)
    for width in range(36, 130):
        bar = text_of(cache_bar(state, width, UNICODE)).rstrip()
        assert bar.endswith(" 30 %"), (width, bar)
        assert bar.count(" %") == 3, (width, bar)
        assert width_of(cache_bar(state, width, UNICODE)) <= width
        figures = " ".join(texts(cache_figures(state, width, UNICODE)))
        assert figures.count(" %") == 4, (width, figures)


def test_rows_on_one_line_never_pass_its_end() -> None:
    state = played(40)
    for width in range(30, 120):
        for row in (machine_row, throughput_row, batch_row):
            assert width_of(row(state, width, UNICODE)) <= width


def test_the_header_says_what_is_served_and_whether_it_holds() -> None:
    state = played(40)
    assert text_of(header_line(state, Modes(), NOW_S, 100, UNICODE)) == (
        " pagetop  SmolLM2-135M-Instruct · cuda:0 RTX 4070 · block 16 · kv int8 · up 1:00:10          ● live "
    )
    assert text_of(header_line(state, Modes(is_paused=True), NOW_S + 12, 100, UNICODE)).endswith(
        "⏸ paused  ● 12.0 s old "
    )
    state.lose(Link("lost", "why", 1.0))
    assert text_of(header_line(state, Modes(), NOW_S + 3, 100, UNICODE)).endswith(
        "○ disconnected, retrying · 3.0 s old "
    )
    assert text_of(header_line(state, Modes(source="demo"), NOW_S, 40, ASCII)).endswith("demo  o lost, 0.0 s old ")


def test_the_header_says_how_good_a_quantized_cache_was_found_to_be() -> None:
    state = State()
    frame = FakeEngine().frame()
    state.take(msgspec.structs.replace(frame, figures=frame.figures | {"kv_agreement_ratio": 0.9596}), NOW_S)
    assert " · kv int8 (96.0% as 16 bits) · " in text_of(header_line(state, Modes(), NOW_S, 120, UNICODE))


def test_the_header_leaves_out_what_does_not_fit_whole() -> None:
    state = State()
    frame = FakeEngine().frame()
    state.take(msgspec.structs.replace(frame, figures=frame.figures | {"kv_agreement_ratio": 0.9596}), NOW_S)
    for width, last in (
        (110, "kv int8 (96.0% as 16 bits) · up 1:00:00"),
        (103, "kv int8 (96.0% as 16 bits)"),
        (90, "kv int8"),
        (72, "block 16"),
        (60, "cuda:0 RTX 4070"),
    ):
        line = text_of(header_line(state, Modes(), NOW_S, width, UNICODE))
        assert line.removesuffix("● live ").rstrip().endswith(last)
        assert len(line) == width
    assert text_of(header_line(state, Modes(), NOW_S, 24, UNICODE)) == " pagetop  SmolLM ● live "


def test_what_is_too_old_is_not_live_in_the_header() -> None:
    state = played(40)
    assert text_of(header_line(state, Modes(), NOW_S + 9, 100, UNICODE)).endswith(" ○ 9.0 s old ")
    assert text_of(header_line(state, Modes(source="demo"), NOW_S + 9, 100, UNICODE)).endswith(" ● 9.0 s old ")


def test_a_slow_pace_that_the_daemon_chose_is_said_and_is_no_delay() -> None:
    state = State()
    state.take(msgspec.structs.replace(FakeEngine().frame(), interval_s=2.0), NOW_S)
    for age_s, told in ((0.0, "● live, every 2 s "), (2.7, "● live, every 2 s "), (2.8, "● 2.8 s old ")):
        assert text_of(header_line(state, Modes(), NOW_S + age_s, 100, UNICODE)).endswith(told)
    assert text_of(header_line(state, Modes(), NOW_S, 50, UNICODE)).endswith("● live ")


def test_a_daemon_that_is_loading_says_how_far() -> None:
    state = State()
    frame = msgspec.structs.replace(FakeEngine().frame(), state="loading", detail="43 %", requests=[], blocks=None)
    state.take(frame, NOW_S)
    assert "loading (43 %)" in text_of(header_line(state, Modes(), NOW_S, 100, UNICODE))
