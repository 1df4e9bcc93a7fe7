"""More connections than seats and queue: everybody is served in full, or told when to come back."""

from pagedd.bench.overload import crowd, health_probe

from .conftest import StartDaemon


async def test_a_crowd_is_served_or_refused_and_health_is_answered_all_the_while(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--max-num-seqs", "4", "--max-queued-requests", "16", "--num-blocks", "64").wait_ready()
    async with health_probe(daemon.endpoints.http) as health_s:
        answers = await crowd(daemon.endpoints.http, num_connections=100, num_requests=1000)
    assert not answers.wrong
    assert answers.num(200) >= 20
    assert answers.num(429) >= 20
    assert answers.num(200) + answers.num(429) == 1000
    assert health_s
