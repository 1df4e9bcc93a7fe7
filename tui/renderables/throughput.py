"""Tokens per second in and out with their recent past, and the latencies that clients see."""

from pagedd.tui.glyphs import Glyphs
from pagedd.tui.line import Line, Span, as_fits, cut
from pagedd.tui.renderables import numbers
from pagedd.tui.renderables.graphs import graph
from pagedd.tui.state import State

_LABEL = 4
_BOUND = 6
_VALUE = 13  # "  1 284 tok/s"


def throughput_title(width: int, glyphs: Glyphs) -> str:
    return f"Throughput, last {graph_seconds(width, glyphs)} s"


def graph_seconds(width: int, glyphs: Glyphs) -> int:
    """Seconds that a graph in a panel of this width shows."""
    return _graph_width(width) * (2 if glyphs.is_unicode else 1)


def throughput_lines(state: State, width: int, height: int, glyphs: Glyphs) -> list[Line]:
    """Two graphs that share what height there is, then two lines of latencies."""
    graph_height = max(1, (height - 2) // 2)
    first = ("first token", "first_token_seconds_p50", "p95", "first_token_seconds_p95")
    gap = ("gap", "inter_token_seconds_p50", "p99", "inter_token_seconds_p99")
    lines = [
        *_graph_lines(state, "out", "output_tokens", "graph.out", width, graph_height, glyphs),
        *_graph_lines(state, "in", "prompt_tokens", "graph.in", width, graph_height, glyphs),
        *(_latency(state, *figures, width, glyphs) for figures in (first, gap)),
    ]
    return [cut(line, width) for line in lines]


def throughput_row(state: State, width: int, glyphs: Glyphs) -> Line:
    """The same on one line."""
    missing = glyphs.missing
    out, taken = state.rates["output_tokens"], state.rates["prompt_tokens"]
    graph_width = max(0, min(24, width - 72))
    bound = numbers.rounded_maximum(state.series["output_tokens"].maximum(graph_width * 2))
    curve = graph(state.series["output_tokens"].last(graph_width * 2), bound, graph_width, 1, glyphs)[0]
    curves: list[Span] = [(numbers.count(bound, 5), "faint"), (curve, "graph.out")] if graph_width >= 5 else []
    first = numbers.milliseconds(state.figure("first_token_seconds_p50"), missing)
    gap = numbers.milliseconds(state.figure("inter_token_seconds_p50"), missing)
    parts: list[Line] = [
        [("out   ", "dim"), *curves, (f"{numbers.count(out, 6, missing)} tok/s", "strong")],
        [("in", "dim"), (f"{numbers.count(taken, 7, missing)} tok/s", "")],
        [("first ", "dim"), (first, "")],
        [("gap ", "dim"), (gap, "")],
    ]
    return as_fits(parts, width, "  ")


def _graph_lines(
    state: State, label: str, name: str, role: str, width: int, height: int, glyphs: Glyphs
) -> list[list[Span]]:
    graph_width = _graph_width(width)
    seconds = graph_seconds(width, glyphs)
    bound = numbers.rounded_maximum(state.series[name].maximum(seconds))
    curves = graph(state.series[name].last(seconds), bound, graph_width, height, glyphs)
    value = f"{numbers.count(state.rates[name], _VALUE - 6, glyphs.missing)} tok/s"
    lines: list[list[Span]] = []
    for row, curve in enumerate(curves):
        is_last = row == height - 1
        bound_text = numbers.count(bound, _BOUND) if row == 0 else " " * _BOUND
        lines.append(
            [
                (label.ljust(_LABEL) if is_last else " " * _LABEL, "dim"),
                (bound_text, "faint"),
                (glyphs.bar_ends[0], "frame"),
                (curve, role),
                (value if is_last else "", "strong" if role == "graph.out" else ""),
            ]
        )
    return lines


def _latency(state: State, label: str, half: str, high_label: str, high: str, width: int, glyphs: Glyphs) -> list[Span]:
    return [
        (label.ljust(12) if width >= 42 else label[:5].ljust(6), "dim"),
        ("p50 " if width >= 31 else "", "dim"),
        (numbers.milliseconds(state.figure(half), glyphs.missing), ""),
        (f"   {high_label} " if width >= 42 else f" {high_label} ", "dim"),
        (numbers.milliseconds(state.figure(high), glyphs.missing), ""),
    ]


def _graph_width(width: int) -> int:
    return max(1, width - _LABEL - _BOUND - 1 - _VALUE)
