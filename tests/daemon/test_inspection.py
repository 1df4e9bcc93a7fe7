"""Who may see what of blocks, prefixes and texts, with a scripted engine and no sockets."""

import os

import msgspec
import pytest

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Chat, ChatMessage, Generate
from pagedd.client.questions import EvictPrefix, GetBlock, GetPrefixes, GetPreviews, GetStats, GetText, Owner
from pagedd.daemon.caller import Caller
from pagedd.daemon.frames import PREVIEW_CHARS
from pagedd.daemon.inspection import MAX_TEXT_CHARS, Inspection, Question
from pagedd.daemon.service import Service
from pagedd.engine.kv.prefix_tree import PrefixRun, PrefixTree
from pagedd.engine.stats import BlockInfo, EngineSnapshot

from .byte_model import EOS
from .scripted_host import ScriptedHost
from .waiting import until

ANA, BOB, KEY = Caller(uid=100_001), Caller(uid=100_002), Caller(key_id="abc")
ROOT, DAEMON = Caller(uid=0), Caller(uid=os.geteuid())
DIGEST = bytes(range(16))
OF_ANA = (("caller", "uid:100001"),)


@pytest.fixture
def inspection(service: Service) -> Inspection:
    return Inspection(service)


async def started(service: Service, host: ScriptedHost, message: Generate | Chat, caller: Caller = ANA) -> str:
    """Starts a request and returns the daemon's id once the engine has it."""
    before = len(host.submitted)
    [request_id] = service.start([message], caller, lambda answer: None)
    await until(lambda: len(host.submitted) > before)
    return request_id


async def refusal(inspection: Inspection, question: Question, caller: Caller) -> tuple[str, str | None]:
    with pytest.raises(PageddError) as refused:
        await inspection.answer(question, caller)
    return refused.value.code, refused.value.field


def block(*owners: str, **changes: object) -> BlockInfo:
    info = BlockInfo(
        state="used" if owners else "cached",
        ref_count=len(owners),
        owners=[(owner, 0, 2) for owner in owners],
        token_ids=list(b"secret"),
        digest=DIGEST,
        extras=OF_ANA,
        num_hits=3,
        last_use_s=0.0 if owners else 7.0,
    )
    for name, value in changes.items():
        setattr(info, name, value)
    return info


def run(first: int, parent: int | None, extras: tuple[tuple[str, str], ...] = OF_ANA) -> PrefixRun:
    return PrefixRun(
        digest=bytes([first]) * 16,
        parent=None if parent is None else bytes([parent]) * 16,
        depth=0 if parent is None else 2,
        num_blocks=2,
        num_hits=1,
        last_use_s=4.0,
        state="cached",
        extras=extras,
        token_ids=tuple(b"first words"),
    )


@pytest.mark.parametrize("caller", [ANA, ROOT, DAEMON])
async def test_its_owner_and_administrators_see_what_a_cached_block_holds(
    inspection: Inspection, host: ScriptedHost, caller: Caller
) -> None:
    host.blocks[5] = block()
    detail = await inspection.answer(GetBlock(id="q", index=5), caller)
    assert (detail.id, detail.index, detail.state, detail.num_hits, detail.last_use_s) == ("q", 5, "cached", 3, 7.0)
    assert (detail.text, detail.token_ids, detail.digest) == ("secret", list(b"secret"), DIGEST.hex())


@pytest.mark.parametrize("caller", [BOB, KEY])
async def test_others_see_that_a_block_is_there_but_neither_content_nor_what_would_confirm_a_guess(
    inspection: Inspection, host: ScriptedHost, caller: Caller
) -> None:
    host.blocks[5] = block()
    detail = await inspection.answer(GetBlock(id="q", index=5), caller)
    assert (detail.state, detail.num_tokens, detail.num_hits) == ("cached", 6, 3)
    assert (detail.text, detail.token_ids) == (None, [])
    assert detail.digest != DIGEST.hex()
    again = await inspection.answer(GetBlock(id="r", index=5), caller)
    assert again.digest == detail.digest


async def test_an_open_block_is_seen_by_those_who_use_it(
    service: Service, inspection: Inspection, host: ScriptedHost
) -> None:
    request_id = await started(service, host, Generate(id="a", prompt="secret"), BOB)
    host.blocks[1] = block(request_id, digest=None, extras=())
    seen = await inspection.answer(GetBlock(id="q", index=1), BOB)
    assert (seen.text, seen.digest) == ("secret", "")
    assert seen.owners == [Owner(request_id=request_id, index=0, logical=2)]
    hidden = await inspection.answer(GetBlock(id="q", index=1), ANA)
    assert (hidden.text, hidden.owners) == (None, seen.owners)


async def test_a_block_that_all_callers_share_is_shown_to_administrators_alone(
    inspection: Inspection, host: ScriptedHost
) -> None:
    host.blocks[5] = block(extras=())
    assert (await inspection.answer(GetBlock(id="q", index=5), ANA)).text is None
    assert (await inspection.answer(GetBlock(id="q", index=5), ROOT)).text == "secret"


async def test_control_tokens_in_a_block_are_spelled_out(inspection: Inspection, host: ScriptedHost) -> None:
    host.blocks[5] = block(token_ids=[*b"end", EOS])
    assert (await inspection.answer(GetBlock(id="q", index=5), ANA)).text == "end<|im_end|>"


@pytest.mark.parametrize("index", [-1, 256, 2**40])
async def test_a_block_beyond_the_pool_is_refused_by_name(inspection: Inspection, index: int) -> None:
    assert await refusal(inspection, GetBlock(id="q", index=index), ANA) == ("invalid_value", "index")


async def test_the_tree_shows_each_caller_the_words_of_its_own_prefixes(
    inspection: Inspection, host: ScriptedHost
) -> None:
    host.tree = PrefixTree(runs=[run(1, None), run(2, 1), run(3, None, ())], num_blocks=9, is_cut=True)
    answer = await inspection.answer(GetPrefixes(id="q"), ANA)
    first, second, anybodys = answer.nodes
    assert (first.text, second.text, anybodys.text) == ("first words", "first words", None)
    assert (first.parent, second.parent) == ("", first.digest)
    assert (second.depth, second.num_tokens, second.num_blocks, second.age_s) == (32, 32, 2, 4.0)
    assert (first.user, anybodys.user) == ("100001", "")
    assert (answer.num_blocks, answer.is_cut) == (9, True)


async def test_the_tree_of_others_keeps_its_shape_without_words_or_digests(
    inspection: Inspection, host: ScriptedHost
) -> None:
    host.tree = PrefixTree(runs=[run(1, None), run(2, 1)], num_blocks=4, is_cut=False)
    first, second = (await inspection.answer(GetPrefixes(id="q"), BOB)).nodes
    assert (first.text, second.text) == (None, None)
    assert second.parent == first.digest != (bytes([1]) * 16).hex()
    assert first.user == "100001"


@pytest.mark.parametrize("limit", [0, 10_001])
async def test_a_limit_out_of_range_is_refused(inspection: Inspection, limit: int) -> None:
    assert await refusal(inspection, GetPrefixes(id="q", limit=limit), ANA) == ("invalid_value", "limit")


async def test_a_prefix_is_freed_by_its_digest_and_that_is_an_event(
    service: Service, inspection: Inspection, host: ScriptedHost
) -> None:
    host.tree = PrefixTree(runs=[run(1, None)], num_blocks=2, is_cut=False)
    [node] = (await inspection.answer(GetPrefixes(id="q"), ROOT)).nodes
    evicted = await inspection.evict(EvictPrefix(id="e", digest=node.digest), ROOT)
    assert (evicted.id, evicted.num_blocks, evicted.num_kept) == ("e", 2, 0)
    assert [(event.kind, event.reason) for event in service.events.newest(1)] == [
        ("eviction", "2 blocks of a prefix were freed by root")
    ]


async def test_what_the_disk_keeps_of_an_evicted_prefix_is_said(
    service: Service, inspection: Inspection, host: ScriptedHost
) -> None:
    host.tree, host.num_left_on_disk = PrefixTree(runs=[run(1, None)], num_blocks=2, is_cut=False), 3
    [node] = (await inspection.answer(GetPrefixes(id="q"), ROOT)).nodes
    evicted = await inspection.evict(EvictPrefix(id="e", digest=node.digest), ROOT)
    assert (evicted.num_left_on_disk, evicted.num_beside_on_disk) == (3, 2)
    [event] = service.events.newest(1)
    assert event.reason == "2 blocks of a prefix were freed by root, 3 stay on the disk"


@pytest.mark.parametrize(("digest", "code"), [("00", "prefix_not_found"), ("no hex", "invalid_value")])
async def test_an_unknown_or_malformed_digest_is_refused(inspection: Inspection, digest: str, code: str) -> None:
    with pytest.raises(PageddError) as refused:
        await inspection.evict(EvictPrefix(id="e", digest=digest), ROOT)
    assert (refused.value.code, refused.value.field) == (code, "digest")


async def test_the_text_of_a_request_is_prompt_and_what_is_out_so_far(
    service: Service, inspection: Inspection, host: ScriptedHost
) -> None:
    request_id = await started(service, host, Generate(id="a", prompt="Once"))
    host.produce(request_id, b" upon")
    text = await inspection.answer(GetText(id="q", target=request_id), ANA)
    assert (text.id, text.request_id, text.prompt, text.outputs) == ("q", request_id, "Once", [" upon"])


async def test_a_chat_is_shown_as_lines_and_token_ids_as_their_text(
    service: Service, inspection: Inspection, host: ScriptedHost
) -> None:
    said = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hi")]
    chat = await started(service, host, Chat(id="a", messages=said))
    ids = await started(service, host, Generate(id="b", prompt_token_ids=list(b"abc")))
    prompts = [(await inspection.answer(GetText(id="q", target=target), ROOT)).prompt for target in (chat, ids)]
    assert prompts == ["system: Be brief.\nuser: Hi", "abc"]


async def test_a_long_prompt_keeps_its_beginning_and_a_long_output_its_end(
    service: Service, inspection: Inspection, host: ScriptedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedd.daemon.inspection.MAX_TEXT_CHARS", 4)
    request_id = await started(service, host, Generate(id="a", prompt="abcdefg"))
    host.produce(request_id, b"hijklmn")
    text = await inspection.answer(GetText(id="q", target=request_id), ANA)
    assert (text.prompt, text.outputs) == ("abcd", ["klmn"])
    assert MAX_TEXT_CHARS == 16384  # as the protocol says


@pytest.mark.parametrize("caller", [BOB, KEY])
async def test_another_users_text_is_forbidden_and_an_ended_request_is_not_found(
    service: Service, inspection: Inspection, host: ScriptedHost, caller: Caller
) -> None:
    request_id = await started(service, host, Generate(id="a", prompt="secret"))
    assert (await refusal(inspection, GetText(id="q", target=request_id), caller))[0] == "forbidden"
    assert service.cancel(request_id)
    assert (await refusal(inspection, GetText(id="q", target=request_id), ANA))[0] == "request_not_found"


async def test_a_frame_that_was_asked_for_previews_what_its_asker_may_see(
    service: Service, inspection: Inspection, host: ScriptedHost
) -> None:
    of_both = [
        await started(service, host, Generate(id="a", prompt="a\n secret " + "x" * 500), ANA),
        await started(service, host, Chat(id="b", messages=[ChatMessage(role="user", content="Hello Bob")]), BOB),
    ]

    async def previews(caller: Caller) -> list[str]:
        frame = (await inspection.answer(GetStats(id="q"), caller)).frame
        shown = {row.request_id: row.preview for row in frame.requests}
        alone = (await inspection.answer(GetPreviews(id="q"), caller)).previews
        assert alone == {request_id: text for request_id, text in shown.items() if text}
        return [shown[request_id] for request_id in of_both]

    of_ana, of_bob = "a secret " + "x" * (PREVIEW_CHARS - 9), "Hello Bob"
    assert await previews(ANA) == [of_ana, ""]
    assert await previews(BOB) == ["", of_bob]
    assert await previews(ROOT) == [of_ana, of_bob]


async def test_a_frame_for_everybody_holds_nothing_of_what_anybody_wrote(
    service: Service, inspection: Inspection, host: ScriptedHost
) -> None:
    request_id = await started(service, host, Generate(id="myname", prompt="secret", cache_salt="mysalt"))
    host.produce(request_id, b"answer")
    service.start([Generate(id="b", prompt="x", model="wrongname")], ANA, lambda answer: None)
    frame = msgspec.msgpack.encode(await service.stats_frame(blocks=True))
    assert b"model_not_found" in frame  # the refusal is there, without the name
    for word in (b"secret", b"mysalt", b"answer", b"myname", b"wrongname"):
        assert word not in frame


async def test_a_request_that_has_ended_is_no_row_although_the_engine_still_had_it(
    service: Service, inspection: Inspection, host: ScriptedHost
) -> None:
    going = await started(service, host, Generate(id="a", prompt="a"))
    staying = await started(service, host, Generate(id="b", prompt="b"))
    of_before = await host.snapshot()
    assert service.cancel(going)

    async def snapshot() -> EngineSnapshot:
        return of_before

    host.snapshot = snapshot  # type: ignore[method-assign]
    frame = (await inspection.answer(GetStats(id="q"), ANA)).frame
    assert [row.request_id for row in frame.requests] == [staying]
    assert [(ending.request_id, ending.outcome) for ending in frame.endings] == [(going, "abort")]
