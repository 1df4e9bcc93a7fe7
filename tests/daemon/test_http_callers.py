"""Who may call over HTTP: by the socket's file, as the kernel says, and by a key on the TCP port."""

import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from pagedd.client.errors import PageddError

from .served import Served, serving


async def test_the_socket_is_open_to_the_group_and_closed_to_others(served: Served) -> None:
    assert stat.S_IMODE(served.endpoints.http.stat().st_mode) == 0o660


@pytest.mark.parametrize("umask", [0o000, 0o077])
async def test_the_sockets_modes_do_not_depend_on_the_umask(socket_folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        async with serving(socket_folder) as served:
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in served.endpoints.directory.iterdir()}
    finally:
        os.umask(before)
    assert modes == {"http.sock": 0o660, "pagedd.sock": 0o660, "stats.sock": 0o660, "admin.sock": 0o600}


async def test_any_host_is_right_on_the_socket_and_no_page_is_told_that_it_may_read(served: Served) -> None:
    headers = {"Host": "evil.example", "Origin": "http://evil.example"}
    async with served.http.get("http://localhost/health", headers=headers) as response:
        assert response.status == 200
        assert not [name for name in response.headers if name.lower().startswith("access-control")]
    async with served.http.options("http://localhost/v1/completions", headers=headers) as response:
        assert response.status == 405


async def test_the_caller_is_who_the_kernel_says(served: Served) -> None:
    await served.post("/v1/completions", {"prompt": "a"})
    assert served.host.submitted[0].cache_extras == (("caller", f"uid:{os.geteuid()}"),)


@pytest.fixture
async def tcp(socket_folder: Path, free_port: int) -> AsyncIterator[tuple[Served, str]]:
    keys = socket_folder / "keys"
    keys.write_text("# ours\n\nfirst-key\nsecond-key\n")
    async with serving(socket_folder, http_port=free_port, api_key_file=keys) as running:
        yield running, f"http://127.0.0.1:{free_port}"


async def test_tcp_needs_a_key_and_each_key_has_a_cache_of_its_own(tcp: tuple[Served, str]) -> None:
    served, url = tcp
    async with aiohttp.ClientSession() as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first-key"}):
            async with http.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=headers) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "unauthorized"
        for key in ("first-key", "second-key"):
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=headers) as response:
                assert response.status == 200
        async with http.get(f"{url}/metrics") as response:
            assert response.status == 401
        async with http.get(f"{url}/health") as response:
            assert response.status == 200
    first, second = (request.cache_extras[0] for request in served.host.submitted)
    assert first[1].startswith("key:")
    assert first != second
    assert "first-key" not in first[1]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost:1", ""])
async def test_tcp_refuses_a_page_that_was_sent_here_under_another_name(tcp: tuple[Served, str], host: str) -> None:
    _, url = tcp
    headers = {"Host": host, "Authorization": "Bearer first-key"}
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/models", headers=headers) as response:
        assert response.status == 403


async def test_only_administrators_put_the_engine_to_sleep(tcp: tuple[Served, str]) -> None:
    served, url = tcp
    (served.endpoints.directory.parent / "keys").write_text("laptop first-key\nowner third-key admin\n")
    assert served.http_api.reload_keys(())
    async with aiohttp.ClientSession() as http:
        for key, status in (("first-key", 403), ("second-key", 401), ("third-key", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post(f"{url}/sleep", headers=headers) as response:
                assert response.status == status
            assert served.host.is_sleeping is (status == 200)
        async with http.post(f"{url}/wake_up", headers=headers) as response:
            assert response.status == 200
        mere_user = {"Authorization": "Bearer first-key"}
        async with http.post(f"{url}/load", json={"model": "x"}, headers=mere_user) as response:
            assert response.status == 403
    assert served.host.num_wakes == 1
    served.host.get_up()
    # On the Unix socket it is whom the kernel names, here the daemon's own user.
    assert (await served.post("/sleep", {}))[0] == 200


async def test_a_key_file_that_is_wrong_changes_no_key(
    tcp: tuple[Served, str],
) -> None:
    served, url = tcp
    (served.endpoints.directory.parent / "keys").write_text("a b c\n")
    with pytest.raises(PageddError, match="line 1: it is KEY"):
        served.http_api.reload_keys(())
    headers = {"Authorization": "Bearer second-key"}
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/models", headers=headers) as response:
        assert response.status == 200
