"""The daemon's TOML file, and the file with the API keys."""

from pathlib import Path

from pagedd.bench.fuzz.file_of import file_of
from pagedd.bench.fuzz.target import Target, check_refusal
from pagedd.client.errors import PageddError
from pagedd.daemon.api_keys import read_api_keys
from pagedd.daemon.config import load_config

_NO_FILE = Path("/nonexistent")


def read(data: bytes) -> None:
    path = file_of(data, "settings")
    try:
        load_config(["--config", str(path)], {}, _NO_FILE)
    except PageddError as error:
        check_refusal(error)
    try:
        read_api_keys(path)
    except PageddError as error:
        check_refusal(error)


TARGET = Target(
    read,
    [
        b'model = "a"\nnum_blocks = 64\nkv_cache_dtype = "int8"\nenable_prefix_caching = false\n',
        b"drain_seconds = 1.5\nhttp_port = 8000\nmax_num_seqs = 0x10\nlog_level = '''debug'''\n",
        b'[quota]\nmax_requests = 4\n[quota.user.ana]\nweight = 2\n[quota.key."a b"]\ntokens_per_minute = 1_000\n',
        b"a.b.c = [[1, 2], {x = 1979-05-27T07:32:00Z}]\n[cost]\nidle_watts = inf\n",
        b"# ours\nlaptop 0123456789abcdef01234567\nowner sha256:" + b"0" * 64 + b" admin\n",
    ],
    weight=1,
)
