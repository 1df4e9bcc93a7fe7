"""Answers to questions about one thing: the statistics, a block, the cached prefixes, a request's text.

Owns what a caller may see of them. Who a caller is comes from the kernel (`caller.py`): texts, token ids and true
digests are for root, the daemon's own user and the user whose request they belong to; counts are for everybody who may
open the socket.
"""

import asyncio
import secrets
from hashlib import blake2b

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Chat, Generate
from pagedd.client.questions import (
    BlockDetail,
    Evicted,
    EvictPrefix,
    GetBlock,
    GetPrefixes,
    GetPreviews,
    GetStats,
    GetText,
    GetUsage,
    Owner,
    Prefixes,
    PrefixNode,
    Previews,
    RequestText,
    Stats,
    UsageReport,
)
from pagedd.daemon.caller import Caller, name_of_tag
from pagedd.daemon.frames import preview
from pagedd.daemon.limits import Limit
from pagedd.daemon.served_model import ServedModel
from pagedd.daemon.service import Service
from pagedd.engine.kv.prefix_tree import PrefixRun

Question = GetStats | GetBlock | GetPrefixes | GetText | GetPreviews | GetUsage
Answer = Stats | BlockDetail | Prefixes | RequestText | Previews | UsageReport

MAX_TEXT_CHARS = 16384
_INDEX = Limit("index", "A block's physical number.", low=0, high=2**31 - 1)
_LIMIT = Limit("limit", "Most nodes of the tree.", low=1, high=10_000)
_DIGEST_BYTES = 16


class Inspection:
    """The answers of one service. Every method may raise what the engine's absence raises."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stand_in_key = secrets.token_bytes(32)

    async def answer(self, question: Question, caller: Caller) -> Answer:
        """Raises `PageddError`: `invalid_value`, `request_not_found`, `forbidden`."""
        match question:
            case GetStats(id=id, blocks=blocks):
                return Stats(id=id, frame=await self._service.stats_frame(blocks, caller))
            case GetBlock():
                return await self._block(question, caller)
            case GetPrefixes():
                return await self._prefixes(question, caller)
            case GetText():
                return self._text(question, caller)
            case GetPreviews(id=id):
                seen = (entry for entry in self._service.live_entries() if caller.may_see(entry.caller.tag))
                return Previews(id=id, previews={entry.request.request_id: preview(entry.message) for entry in seen})
            case GetUsage(id=id):
                return self._service.metering.report(id)

    async def evict(self, order: EvictPrefix, admin: Caller) -> Evicted:
        """Frees a prefix. Raises `PageddError`: `prefix_not_found`, `invalid_value`."""
        try:
            digest = bytes.fromhex(order.digest)
        except ValueError:
            raise PageddError(
                "invalid_value", "digest is not hexadecimal; take one of `prefixes`", field="digest"
            ) from None
        eviction = await self._service.host.evict_prefix(digest)
        if eviction is None:
            raise PageddError(
                "prefix_not_found", "no cached prefix has that digest; it may just have gone", field="digest"
            )
        left = f", {eviction.num_left_on_disk} stay on the disk" if eviction.num_left_on_disk else ""
        reason = f"{eviction.num_freed} blocks of a prefix were freed by {admin.name}{left}"
        self._service.events.add("eviction", reason)
        return Evicted(
            id=order.id,
            num_blocks=eviction.num_freed,
            num_kept=eviction.num_kept,
            num_left_on_disk=eviction.num_left_on_disk,
            num_beside_on_disk=eviction.num_beside_on_disk,
        )

    async def _block(self, question: GetBlock, caller: Caller) -> BlockDetail:
        _INDEX.check(question.index)
        info = await self._service.host.block(question.index)
        if info is None:
            stats = self._service.host.stats
            end = "the pool's end" if stats is None else f"{stats.num_blocks} blocks"
            raise PageddError("invalid_value", f"index = {question.index} lies beyond {end}", field="index")
        entries = (self._service.live_entry(request_id) for request_id, _, _ in info.owners)
        tags = [_owner_of(info.extras), *(entry.caller.tag for entry in entries if entry is not None)]
        may_see = any(caller.may_see(tag) for tag in tags)
        return BlockDetail(
            id=question.id,
            index=question.index,
            state=info.state,
            ref_count=info.ref_count,
            owners=[Owner(request_id=owner, index=choice, logical=logical) for owner, choice, logical in info.owners],
            num_tokens=len(info.token_ids),
            digest="" if info.digest is None else self._shown(info.digest, may_see),
            num_hits=info.num_hits,
            last_use_s=info.last_use_s,
            token_ids=info.token_ids if may_see else [],
            text=self._decode(self._service.model, info.token_ids) if may_see else None,
        )

    async def _prefixes(self, question: GetPrefixes, caller: Caller) -> Prefixes:
        _LIMIT.check(question.limit)
        tree = await self._service.host.prefixes(question.limit)
        info = self._service.host.info
        block_size = 0 if info is None else info.block_size
        # Texts of some thousand nodes take some ten milliseconds.
        nodes = await asyncio.to_thread(lambda: [self._node(run, caller, block_size) for run in tree.runs])
        return Prefixes(id=question.id, nodes=nodes, num_blocks=tree.num_blocks, is_cut=tree.is_cut)

    def _node(self, run: PrefixRun, caller: Caller, block_size: int) -> PrefixNode:
        owner = _owner_of(run.extras)
        may_see = caller.may_see(owner)
        return PrefixNode(
            digest=self._shown(run.digest, may_see),
            parent="" if run.parent is None else self._shown(run.parent, may_see),
            depth=run.depth * block_size,
            num_tokens=run.num_blocks * block_size,
            num_blocks=run.num_blocks,
            num_hits=run.num_hits,
            age_s=run.last_use_s,
            state=run.state,
            user="" if owner is None else name_of_tag(owner),
            text=self._decode(self._service.model, run.token_ids) if may_see else None,
        )

    def _text(self, question: GetText, caller: Caller) -> RequestText:
        entry = self._service.live_entry(question.target)
        if entry is None:
            raise PageddError("request_not_found", f"no live request {question.target[:128]!r}", field="target")
        if not caller.may_see(entry.caller.tag):
            raise PageddError("forbidden", f"request {question.target} is another user's; only root may read its text")
        return RequestText(
            id=question.id,
            request_id=entry.request.request_id,
            prompt=self._prompt(entry.message),
            outputs=[text[-MAX_TEXT_CHARS:] for text in entry.request.texts()],
        )

    def _prompt(self, message: Generate | Chat) -> str:
        if isinstance(message, Chat):
            text = "\n".join(f"{said.role}: {said.content[:MAX_TEXT_CHARS]}" for said in message.messages)
        elif message.prompt is not None:
            text = message.prompt
        else:
            text = self._decode(self._service.model, (message.prompt_token_ids or [])[:MAX_TEXT_CHARS])
        return text[:MAX_TEXT_CHARS]

    def _shown(self, digest: bytes, may_see: bool) -> str:
        """A digest can be computed from a guess of the text, so that it would confirm the guess."""
        stand_in = blake2b(digest, digest_size=_DIGEST_BYTES, key=self._stand_in_key).digest()
        return (digest if may_see else stand_in).hex()

    @staticmethod
    def _decode(model: ServedModel | None, token_ids: tuple[int, ...] | list[int]) -> str:
        return "" if model is None else model.tokenizer.decode(token_ids, skip_special=False)


def _owner_of(extras: tuple[tuple[str, str], ...]) -> str | None:
    """The tag of the only caller who shares what has those extras (`admission.cache_extras`)."""
    return dict(extras).get("caller")
