"""A frame as text."""

from collections.abc import Callable

import pytest

from pagedd.client.questions import Prefixes, PrefixNode
from pagedd.client.render import (
    ASCII,
    UNICODE,
    Glyphs,
    printable,
    redrawn,
    render_blocks,
    render_events,
    render_figures,
    render_prefixes,
    render_requests,
)
from pagedd.client.stats_frame import BlockMap, Event, RequestRow, StatsFrame


@pytest.fixture
def frame(make_frame: Callable[..., StatsFrame]) -> StatsFrame:
    return make_frame()


def test_requests_are_rows_with_the_letters_of_the_block_map(frame: StatsFrame) -> None:
    assert render_requests(frame, UNICODE) == [
        "tiny · cpu · float32 · kv float32 · ready · up 1:01",
        "map  id  who  prio  state        prompt  cached  out  blocks    first    age",
        "a    r1  ana     0  decode            6       4    2       2  62.0 ms  2.9 s",
        "b    r2  ana   -10  prefill <1%    4096       4    0       2        –  0.4 s",
        "·    r3  ana    20  waiting          96       –    0       0        –  0.8 s",
    ]


@pytest.mark.parametrize(
    ("state", "detail", "shown"),
    [
        ("asleep", "asleep: a request wakes it", "asleep: a request wakes it"),
        ("loading", "loading, 84 % (weights)", "loading, 84 % (weights)"),
        ("starting", "loading, 0 % (engine process)", "starting (loading, 0 % (engine process))"),
        ("ready", "", "ready"),
    ],
)
def test_the_state_says_no_word_twice(
    make_frame: Callable[..., StatsFrame], state: str, detail: str, shown: str
) -> None:
    [about, *_] = render_requests(make_frame(state=state, detail=detail), UNICODE)
    assert about.split(" · ")[4] == shown


def test_the_block_map_shows_owners_shared_cached_and_free_blocks(frame: StatsFrame) -> None:
    assert render_blocks(frame, UNICODE, width=60) == [
        "tiny · cpu · float32 · kv float32 · ready · up 1:01",
        "8 blocks of 4 tokens: 3 used, 2 cached, 3 free",
        "0000 aS·▒b▒··",
        "a r1 (ana)   b r2 (ana)   S shared   ▒ cached   · free",
    ]


def test_the_block_map_has_an_ascii_form(frame: StatsFrame) -> None:
    assert render_blocks(frame, ASCII, width=60)[2:] == [
        "0000 aS.:b:..",
        "a r1 (ana)   b r2 (ana)   S shared   : cached   . free",
    ]
    assert all(line.isascii() for line in render_blocks(frame, ASCII, 60) + render_requests(frame, ASCII))


def test_the_block_map_fills_the_width_with_groups_of_eight(make_frame: Callable[..., StatsFrame]) -> None:
    frame = make_frame(requests=[], blocks=BlockMap(block_size=4, states=bytes(range(3)) * 10, ref_counts=bytes(30)))
    assert render_blocks(frame, ASCII, width=4 + 2 * 9)[2:-1] == [
        "0000 .:?.:?.: ?.:?.:?.",
        "0016 :?.:?.:? .:?.:?",
        "? a sequence that has just ended",
    ]
    # Narrower than one group is still one group.
    assert render_blocks(frame, ASCII, width=1)[2] == "0000 .:?.:?.:"


def test_lines_that_repeat_are_shown_once(make_frame: Callable[..., StatsFrame]) -> None:
    states = bytes(8 * 5) + bytes([1]) * 8
    frame = make_frame(requests=[], blocks=BlockMap(block_size=4, states=states, ref_counts=bytes(len(states))))
    assert render_blocks(frame, ASCII, width=13)[2:6] == ["0000 ........", "*", "0040 ::::::::", ": cached"]


def test_the_last_line_is_shown_even_when_it_repeats(make_frame: Callable[..., StatsFrame]) -> None:
    frame = make_frame(requests=[], blocks=BlockMap(block_size=4, states=bytes(24), ref_counts=bytes(24)))
    assert render_blocks(frame, ASCII, width=13)[2:] == ["0000 ........", "*", "0016 ........", ". free"]


def test_sequences_past_the_last_letter_share_a_sign(make_frame: Callable[..., StatsFrame]) -> None:
    row = make_frame().requests[0]
    fields = {name: getattr(row, name) for name in row.__struct_fields__}
    rows = [RequestRow(**{**fields, "request_id": f"r{i}", "num_blocks": 1, "block_table": [i]}) for i in range(70)]
    states, ref_counts = bytes([2]) * 70, bytes([1]) * 70
    frame = make_frame(requests=rows, blocks=BlockMap(block_size=4, states=states, ref_counts=ref_counts))
    lines = render_blocks(frame, ASCII, width=120)
    assert lines[2] == ("0000 abcdefgh ijklmnop qrstuvwx yzABCDEF GHIJKLMN OPQRTUVW XYZ01234 56789### ######")
    assert "# another sequence" in lines[-1]


def test_without_a_pool_the_map_is_a_sentence(make_frame: Callable[..., StatsFrame]) -> None:
    frame = make_frame(blocks=None, state="loading", detail="43 %", model="", dtype="", kv_cache_dtype="")
    assert render_blocks(frame, UNICODE, 80) == ["cpu · loading (43 %) · up 1:01", "no block map now: 43 %"]
    # A detail that says no more than the state is not said twice.
    assert render_blocks(make_frame(blocks=None, detail="ready"), UNICODE, 80)[0].endswith("float32 · ready · up 1:01")


def test_the_quality_of_a_quantized_cache_stands_beside_its_form(make_frame: Callable[..., StatsFrame]) -> None:
    frame = make_frame(kv_cache_dtype="int4", figures={"kv_agreement_ratio": 0.9323, "kv_divergence_nats": 0.01243})
    assert render_requests(frame, UNICODE)[0] == ("tiny · cpu · float32 · kv int4 (93.2% as 16 bits) · ready · up 1:01")


def test_figures_keep_their_names_and_units_and_never_show_a_zero_for_nothing(
    make_frame: Callable[..., StatsFrame],
) -> None:
    frame = make_frame(
        figures={
            "kv_usage": 0.615,
            "hit_rate": None,
            "steps_total": 12.0,
            "engine_rss_bytes": float(300 << 20),
            "oldest_wait_s": 0.8,
            "gpu_power_watts": 148.0,
            "step_seconds_forward": 1.5,
        }
    )
    assert render_figures(frame, UNICODE)[1:] == [
        "kv_usage               61.5  %",
        "hit_rate                  –",
        "steps_total              12",
        "engine_rss_bytes      300.0  MiB",
        "oldest_wait_s         0.800  s",
        "gpu_power_watts       148.0  W",
        "step_seconds_forward  1.500  s",
    ]


@pytest.mark.parametrize(
    ("uptime_s", "shown"),
    [(0.0, "0.0 s"), (59.94, "59.9 s"), (60, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (273120, "3d 03:52")],
)
def test_durations_read_like_clocks(make_frame: Callable[..., StatsFrame], uptime_s: float, shown: str) -> None:
    assert render_requests(make_frame(uptime_s=uptime_s), UNICODE)[0].endswith(f"up {shown}")


@pytest.mark.parametrize(
    ("encoding", "glyphs"),
    [("utf-8", UNICODE), ("ascii", ASCII), ("latin-1", ASCII), (None, ASCII), ("nonsense", ASCII)],
)
def test_glyphs_are_those_that_the_terminal_can_show(encoding: str | None, glyphs: Glyphs) -> None:
    assert Glyphs.for_encoding(encoding) is glyphs


def test_text_from_others_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07\x9b\r\n\tc") == "a\ufffd[31mb\ufffd\ufffd\ufffd\n\tc"


def test_names_from_others_cannot_steer_the_terminal(make_frame: Callable[..., StatsFrame]) -> None:
    frame = make_frame()
    frame.requests[0].user = "\x1b]0;x\x07"
    shown = "\n".join(render_requests(frame, UNICODE) + render_blocks(frame, UNICODE, 80))
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_a_redrawn_picture_leaves_nothing_of_the_one_before_and_never_scrolls() -> None:
    assert redrawn(["abc", "d"], columns=80, rows=24) == "\x1b[H\x1b[Kabc\n\x1b[Kd\n\x1b[J"
    assert redrawn(["abc", "d", "e"], columns=2, rows=3) == "\x1b[H\x1b[Kab\n\x1b[Kd\n\x1b[J"


def test_prefixes_are_a_tree_with_what_continues_a_run_further_in() -> None:
    def node(digest: str, parent: str, **fields: object) -> PrefixNode:
        return PrefixNode(digest=digest, parent=parent, depth=0, num_tokens=8, num_blocks=2, **fields)  # type: ignore[arg-type]

    tree = Prefixes(
        id="1",
        nodes=[
            node("d1", "", num_hits=3, age_s=4.0, state="mixed", user="ana", text="You are\n kind"),
            node("d2", "d1", user="ana", text="and brief\x1b[2J"),
            node("d3", ""),
        ],
        num_blocks=9,
        is_cut=True,
    )
    assert render_prefixes(tree, UNICODE) == [
        "9 blocks are indexed; 6 of them are shown",
        "digest  blocks  tokens  hits   idle  state   who      begins with",
        "d1           2       8     3  4.0 s  mixed   ana      You are kind",
        "d2           2       8     0  0.0 s  cached  ana        and brief\N{REPLACEMENT CHARACTER}[2J",
        "d3           2       8     0  0.0 s  cached  anybody  –",
    ]


def test_events_are_lines_with_what_and_why() -> None:
    event = Event(seq=1, time_s=1000.0, kind="preemption", reason="request r2 needed its seat", request_id="r1")
    [line] = render_events([event])
    assert line.split(maxsplit=1)[1] == "preemption  r1  request r2 needed its seat"
    assert render_events([]) == ["nothing has happened since the daemon started"]
