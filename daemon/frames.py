"""Builds the `StatsFrame` that clients and `pagetop` see from what the engine and the service know at one moment."""

import time
from dataclasses import fields
from importlib.metadata import version
from typing import TYPE_CHECKING

from pagedd.client.protocol import BlockMap, RequestRow, StatsFrame
from pagedd.engine.stats import EngineSnapshot, EngineStats, SequenceSnapshot

if TYPE_CHECKING:
    from pagedd.daemon.service import Service

VERSION = version("pagedd")
# Figures that are not fields of `EngineStats` but follow from them.
_DERIVED = ("kv_usage", "slot_fill", "fragmentation", "contiguous_fragmentation", "hit_rate")


def stats_frame(service: "Service", snapshot: EngineSnapshot | None, detail: str, blocks: bool) -> StatsFrame:
    """`snapshot` is None while there is no engine to ask; its figures are then those of the last step, or none."""
    host = service.host
    info = host.info
    stats = snapshot.stats if snapshot is not None else host.stats
    return StatsFrame(
        version=VERSION,
        time_s=time.time(),
        uptime_s=time.monotonic() - service.started_s,
        state=service.state,
        detail=detail,
        model=service.model.name if service.model is not None else "",
        device=f"{info.device} {info.device_name}" if info is not None else "",
        dtype=info.dtype if info is not None else "",
        kv_cache_dtype=info.kv_cache_dtype if info is not None else "",
        figures=(figures(stats) if stats is not None else {}) | service.machine_figures(),
        requests=[_row(service, sequence, blocks) for sequence in snapshot.sequences] if snapshot is not None else [],
        blocks=_block_map(snapshot) if blocks and snapshot is not None else None,
    )


def figures(stats: EngineStats) -> dict[str, float | None]:
    """Every number of `EngineStats` under its own name; `step_seconds` as one `step_seconds_PART` a part."""
    named: dict[str, float | None] = {
        item.name: getattr(stats, item.name) for item in fields(stats) if item.name != "step_seconds"
    }
    named.update({name: getattr(stats, name) for name in _DERIVED})
    named.update({f"step_seconds_{part}": seconds for part, seconds in stats.step_seconds.items()})
    return named


def _row(service: "Service", sequence: SequenceSnapshot, blocks: bool) -> RequestRow:
    entry = service.live_entry(sequence.request_id)
    return RequestRow(
        request_id=sequence.request_id,
        index=sequence.choice_index,
        # Its request may have ended while the snapshot was on its way.
        user=entry.caller.name if entry is not None else "",
        state=sequence.state,
        priority=sequence.priority,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_output_tokens=sequence.num_output_tokens,
        num_blocks=len(sequence.block_table),
        num_preemptions=sequence.num_preemptions,
        age_s=sequence.age_s,
        first_token_s=sequence.first_token_s,
        block_table=sequence.block_table if blocks else [],
    )


def _block_map(snapshot: EngineSnapshot) -> BlockMap:
    return BlockMap(
        block_size=snapshot.stats.block_size, states=snapshot.block_states, ref_counts=snapshot.block_ref_counts
    )
