"""Frames of the stats socket as they come over the wire."""

from collections.abc import Callable

import msgspec

from pagedd.client.stats_frame import StatsFrame, decode_stats


def test_a_frame_of_an_older_version_still_decodes(make_frame: Callable[..., StatsFrame]) -> None:
    new = {"machine", "events", "seq", "interval_s"}
    new_of_rows = {"model", "num_scheduled_tokens", "max_tokens", "preview"}
    frame = msgspec.to_builtins(make_frame())
    older = {name: value for name, value in frame.items() if name not in new}
    older["requests"] = [
        {name: value for name, value in row.items() if name not in new_of_rows} for row in frame["requests"]
    ]
    blocks = make_frame().blocks
    older["blocks"] = {name: getattr(blocks, name) for name in ("block_size", "states", "ref_counts")}
    decoded = decode_stats(msgspec.msgpack.encode(older))
    assert decoded == make_frame()
    assert (decoded.machine, decoded.events, decoded.seq) == (None, [], 0)
