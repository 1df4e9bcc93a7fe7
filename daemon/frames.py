"""Builds the `StatsFrame` that clients and `pagetop` see from what the engine and the service know at one moment.

A frame for everybody (the stats socket) holds no text; one that was asked for holds what its viewer may see.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import version
from typing import TYPE_CHECKING

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Chat, Generate
from pagedd.client.stats_frame import BlockMap, RequestRow, StatsFrame
from pagedd.daemon.advice import LEAST_BUSY_S
from pagedd.daemon.caller import Caller
from pagedd.daemon.events import EVENTS_KEPT
from pagedd.daemon.telemetry import Reading
from pagedd.daemon.wall_clock import unix_s
from pagedd.engine.kv.quality import KVQuality
from pagedd.engine.stats import EngineSnapshot, EngineStats, SequenceSnapshot

if TYPE_CHECKING:
    from pagedd.daemon.live_requests import LiveEntry
    from pagedd.daemon.service import Service

VERSION = version("pagedd")
EVENTS_IN_A_FRAME = 32
PREVIEW_CHARS = 80
# How long a picture waits for an engine that is in the middle of a long step, and for a driver.
_SNAPSHOT_TIMEOUT_S = 3.0
_MACHINE_TIMEOUT_S = 0.5
# Figures that are not fields of `EngineStats` but follow from them.
_DERIVED = ("kv_usage", "slot_fill", "fragmentation", "contiguous_fragmentation", "hit_rate")


class Frames:
    """Makes pictures of one service and numbers them."""

    def __init__(self, service: "Service") -> None:
        self._service = service
        self._num_made = 0

    async def make(self, *, blocks: bool, viewer: Caller | None = None) -> StatsFrame:
        """`blocks` adds the block map and every block table.

        For one `viewer` it has previews of what that one may see, and every event that is kept. While there is no
        engine to ask, or it is in a long step, the figures are those of the last step, or none.
        """
        service, host = self._service, self._service.host
        reading = await self._read_machine()
        snapshot = None
        detail = service.describe()
        try:
            async with asyncio.timeout(_SNAPSHOT_TIMEOUT_S):
                snapshot = await host.snapshot()
        except TimeoutError:
            detail = f"the engine has been in one step for over {_SNAPSHOT_TIMEOUT_S:.0f} s"
        except PageddError:
            pass  # no engine now; `state` and `detail` say so
        stats, info = snapshot.stats if snapshot is not None else host.stats, host.info
        self._num_made += 1
        return StatsFrame(
            version=VERSION,
            time_s=unix_s(),
            uptime_s=time.monotonic() - service.started_s,
            state=service.state,
            detail=detail,
            model=service.model.name if service.model is not None else "",
            device=f"{info.device} {info.device_name}" if info is not None else "",
            dtype=info.dtype if info is not None else "",
            kv_cache_dtype=info.kv_cache_dtype if info is not None else "",
            figures={
                **(figures(stats) if stats is not None else {}),
                **(quality_figures(info.kv_quality) if info is not None and info.kv_quality is not None else {}),
                **service.metrics.recent_latencies(),
                **service.metering.figures(),
                **reading.figures,
                "observed_seconds": service.doctor.observed_s,
                "observed_seconds_wanted": LEAST_BUSY_S,
            },
            requests=self._rows(snapshot.sequences, blocks, viewer) if snapshot is not None else [],
            blocks=_block_map(snapshot) if blocks and snapshot is not None else None,
            machine=reading.machine,
            events=service.events.newest(EVENTS_IN_A_FRAME if viewer is None else EVENTS_KEPT),
            seq=self._num_made,
            advice=service.doctor.advice(info),
            endings=list(service.endings),
        )

    async def _read_machine(self) -> Reading:
        """In a thread, because a driver may take its time; what it says later is for a later picture."""
        try:
            async with asyncio.timeout(_MACHINE_TIMEOUT_S):
                return await asyncio.to_thread(self._service.read_machine)
        except TimeoutError:
            return Reading()

    def _rows(self, sequences: Sequence[SequenceSnapshot], blocks: bool, viewer: Caller | None) -> list[RequestRow]:
        """Without those whose request has ended while the snapshot was on its way: nobody knows them any more."""
        live = ((sequence, self._service.live_entry(sequence.request_id)) for sequence in sequences)
        return [_row(sequence, entry, blocks, viewer) for sequence, entry in live if entry is not None]


def figures(stats: EngineStats) -> dict[str, float | None]:
    """Every number of `EngineStats` under its own name.

    `step_seconds` is one `step_seconds_PART` a part, `kv_tiers` a `kv_tier_TIER_NAME` for each number of a tier.
    """
    named: dict[str, float | None] = {
        item.name: getattr(stats, item.name) for item in fields(stats) if item.name not in ("step_seconds", "kv_tiers")
    }
    named.update({name: getattr(stats, name) for name in _DERIVED})
    named.update({f"step_seconds_{part}": seconds for part, seconds in stats.step_seconds.items()})
    for tier, numbers in stats.kv_tiers.items():
        named.update({f"kv_tier_{tier}_{item.name}": getattr(numbers, item.name) for item in fields(numbers)})
    return named


def quality_figures(quality: KVQuality) -> dict[str, float | None]:
    """Of a quantized cache that was compared with 16 bits at load."""
    return {"kv_agreement_ratio": quality.agreement, "kv_divergence_nats": quality.divergence_nats}


def preview(message: Generate | Chat) -> str:
    """The first characters of a prompt, or of a chat's last message, in one line. Empty for token ids."""
    text = message.messages[-1].content if isinstance(message, Chat) else message.prompt or ""
    return " ".join(text[: 4 * PREVIEW_CHARS].split())[:PREVIEW_CHARS]


def _block_map(snapshot: EngineSnapshot) -> BlockMap:
    return BlockMap(
        block_size=snapshot.stats.block_size,
        states=snapshot.block_states,
        ref_counts=snapshot.block_ref_counts,
        fills=snapshot.block_fills,
        ages=snapshot.block_ages,
    )


def _row(sequence: SequenceSnapshot, entry: "LiveEntry", blocks: bool, viewer: Caller | None) -> RequestRow:
    return RequestRow(
        request_id=sequence.request_id,
        index=sequence.choice_index,
        user=entry.caller.name,
        state=sequence.state,
        # The engine's own may be less: whoever has much in flight waits a little longer with the next.
        priority=entry.message.priority,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_output_tokens=sequence.num_output_tokens,
        num_blocks=len(sequence.block_table),
        num_preemptions=sequence.num_preemptions,
        age_s=sequence.age_s,
        first_token_s=sequence.first_token_s,
        block_table=sequence.block_table if blocks else [],
        model=entry.request.model,
        num_scheduled_tokens=sequence.num_scheduled_tokens,
        max_tokens=sequence.max_tokens,
        number=sequence.number,
        preview=preview(entry.message) if viewer is not None and viewer.may_see(entry.caller.tag) else "",
    )
