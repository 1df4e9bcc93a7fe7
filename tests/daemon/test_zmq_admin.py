"""The admin socket: its owner acts on any request and prefix, and nobody else does."""

import os

import pytest

from pagedd.client.protocol import Accepted, Cancel, Done, Failed, Ok, SetPriority
from pagedd.client.questions import Evicted, EvictPrefix
from pagedd.daemon import zmq_server
from pagedd.daemon.caller import Caller
from pagedd.engine.kv.prefix_tree import PrefixRun, PrefixTree

from .served import Served, prompt


async def test_the_owner_cancels_and_moves_any_request(served: Served) -> None:
    served.host.reply = lambda request: None
    async with served.client() as client, served.client(served.endpoints.admin) as admin:
        await client.say(prompt())
        accepted = await client.hear()
        assert isinstance(accepted, Accepted)
        await admin.say(SetPriority(id="1", target=accepted.request_id, priority=9))
        assert await admin.hear() == Ok(id="1")
        assert served.host.priorities == [(accepted.request_id, 9)]
        await admin.say(SetPriority(id="2", target=accepted.request_id, priority=900))
        refused = await admin.hear()
        assert isinstance(refused, Failed)
        assert (refused.code, refused.field) == ("invalid_value", "priority")
        await admin.say(Cancel(id="3", target=accepted.request_id))
        assert await admin.hear() == Ok(id="3")
        assert isinstance(await client.hear_end(), Done)
        await admin.say(Cancel(id="4", target=accepted.request_id))
        gone = await admin.hear()
        assert isinstance(gone, Failed)
        assert gone.code == "request_not_found"
        await admin.say(prompt())
        refused = await admin.hear()
        assert isinstance(refused, Failed)
        assert refused.code == "forbidden"


async def test_the_owner_evicts_a_prefix_through_the_admin_socket_alone(served: Served) -> None:
    run = PrefixRun(
        digest=b"d" * 16,
        parent=None,
        depth=0,
        num_blocks=3,
        num_hits=0,
        last_use_s=0.0,
        state="cached",
        extras=(),
        token_ids=(97,),
    )
    served.host.tree = PrefixTree(runs=[run], num_blocks=3, is_cut=False)
    async with served.client() as client, served.client(served.endpoints.admin) as admin:
        await client.say(EvictPrefix(id="1", digest=run.digest.hex()))
        refused = await client.hear()
        assert isinstance(refused, Failed)
        assert refused.code == "forbidden"
        assert served.host.evicted == []
        await admin.say(EvictPrefix(id="2", digest=run.digest.hex()))
        assert await admin.hear() == Evicted(id="2", num_blocks=3)
        await admin.say(EvictPrefix(id="3", digest="00"))
        refused = await admin.hear()
        assert isinstance(refused, Failed)
        assert (refused.id, refused.code) == ("3", "prefix_not_found")


async def test_a_stranger_on_the_admin_socket_is_refused_whatever_the_files_mode(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_server, "caller_of_socket", lambda connection: Caller(uid=os.geteuid() + 1))
    async with served.client(served.endpoints.admin) as admin:
        await admin.say(Cancel(id="1", target="any"))
        refused = await admin.hear()
    assert isinstance(refused, Failed)
    assert refused.code == "forbidden"
