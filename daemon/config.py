"""pagedd's settings: every one declared here, once, with its type, default, range and meaning.

Flags (`--max-num-seqs`), environment (`PAGEDD_MAX_NUM_SEQS`), TOML keys (`max_num_seqs`) and the README's table are
all made from these declarations by `settings.py`.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagedd.client.errors import PageddError
from pagedd.daemon import logs
from pagedd.daemon.cost_config import CostConfig
from pagedd.daemon.quota_config import QuotaConfig
from pagedd.daemon.setting import setting, table
from pagedd.daemon.settings import Loaded, load_settings
from pagedd.engine.config import EngineConfig

DEFAULT_FILE = Path("/etc/pagedd/pagedd.toml")
DEFAULT_MODEL = "smollm2-135m-instruct"

# The most that the engine's 32-bit indices can count, of tokens and of blocks.
_MAX_COUNT = 2**31 - 1

# Variables with the same prefix that others read: `kernels/ops.py`, and the tests.
_OTHER_VARIABLES = ("PAGEDD_KERNELS", "PAGEDD_TEST_MODEL")


SERVED_NAME_RULE = "it is 1 to 256 printable characters"


def is_served_name(name: str) -> bool:
    """Whether it can stand in logs and answers as it is."""
    return 0 < len(name) <= 256 and name.isprintable()


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """Every setting of the daemon. Frozen: a process keeps the settings it was started with."""

    # The model
    model: str = setting(DEFAULT_MODEL, "What to serve: a known name, a Hugging Face name, or a path.")
    served_model_name: str | None = setting(
        None, "The name under which clients ask for the model.", none_means="the model's own"
    )
    max_model_len: int | None = setting(
        None,
        "Longest prompt and output together, in tokens.",
        minimum=1,
        maximum=_MAX_COUNT,
        none_means="the model's context",
    )
    # The device
    device: str = setting("auto", "Where to compute: auto, cpu, cuda or cuda:N.")
    device_fallback: str = setting(
        "none",
        "What serves when the device stays away for a minute: none (wait, then fail) or cpu.",
        choices=("none", "cpu"),
    )
    dtype: str = setting("auto", "Type of weights and activations.", choices=("auto", "float32", "bfloat16", "float16"))
    weight_dtype: str = setting(
        "auto",
        "Form of the weights on a CPU; auto keeps a quantized file's own, unless --dtype float32 asks for more.",
        choices=("auto", "float32", "bf16", "int8", "int4"),
    )
    num_threads: int | None = setting(
        None, "Threads that compute on a CPU.", minimum=1, maximum=1024, none_means="one a physical core"
    )
    # The KV cache
    kv_cache_dtype: str = setting(
        "auto",
        "Form of the KV cache; auto is int8 beside quantized weights, else the activations'. "
        "int8 and fp8 take half of bf16, k8v4 (keys in 8 bits, values in 4) two fifths, int4 a third; "
        "fp16 needs a GPU.",
        choices=("auto", "float32", "bf16", "fp16", "fp8", "int8", "k8v4", "int4"),
    )
    kv_quality_check: str = setting(
        "warn",
        "At load, compare a quantized cache with 16 bits on a text; where it is worse than it should be, "
        "warn in the log or refuse to serve.",
        choices=("warn", "refuse", "off"),
    )
    block_size: int = setting(16, "Tokens in a KV block.", choices=(8, 16, 32))
    num_blocks: int | None = setting(
        None,
        "KV blocks in the pool, exactly.",
        minimum=1,
        maximum=_MAX_COUNT,
        none_means="as many as the memory share holds, at most max_num_seqs full-length requests",
    )
    gpu_memory_utilization: float | None = setting(
        None,
        "Share of the device's free memory for the KV pool.",
        above=0,
        maximum=1,
        none_means="0.9 on a GPU, 0.3 of free RAM on a CPU",
    )
    enable_prefix_caching: bool = setting(True, "Keep the KV blocks of prompts and reuse those of shared prefixes.")
    prefix_sharing: str = setting(
        "caller", "Who shares cached prefixes: each caller with itself, or all.", choices=("caller", "all")
    )
    kv_host_gib: float = setting(
        0.0, "Host memory for KV blocks that the pool evicts, in GiB; 0 is off.", minimum=0, maximum=1 << 20
    )
    kv_disk_gib: float = setting(
        0.0,
        "Disk space for KV blocks, in GiB, so that prefixes survive a restart; 0 is off.",
        minimum=0,
        maximum=1 << 20,
    )
    kv_disk_directory: Path | None = setting(  # noqa: RUF009 (a dataclass field, made once for each)
        None, "Where they are, for one daemon at a time.", none_means="kv beside the cached models"
    )
    # Scheduling
    max_num_seqs: int = setting(32, "Seats: sequences that run at once.", minimum=1, maximum=4096)
    max_num_batched_tokens: int | None = setting(
        None, "Token budget of a step.", minimum=1, maximum=1 << 20, none_means="512 on a CPU, 2048 on a GPU"
    )
    scheduling_policy: str = setting(
        "priority", "Order of the queue; fcfs ignores priorities.", choices=("priority", "fcfs")
    )
    ageing_s_per_point: float = setting(
        0.5, "Seconds of waiting that outweigh one point of priority.", above=0, maximum=3600
    )
    num_speculative_tokens: int = setting(
        7, "Longest guess at a sequence's next tokens, from its own text; 0 is off.", minimum=0, maximum=64
    )
    async_scheduling: str = setting(
        "auto",
        "Form the next step while the device computes one, without guesses; auto does on a GPU.",
        choices=("auto", "on", "off"),
    )
    enforce_eager: bool = setting(False, "Launch each kernel of a step by itself, without CUDA graphs.")
    # Limits at the door
    max_queued_requests: int = setting(
        1024, "Requests that may wait; more are refused with 429.", minimum=1, maximum=1_000_000
    )
    max_prompts_per_request: int = setting(128, "Prompts times choices (n) in one request.", minimum=1, maximum=100_000)
    # Sockets
    runtime_dir: Path | None = setting(  # noqa: RUF009 (a dataclass field, made once for each)
        None,
        "Directory of the sockets.",
        none_means="$RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/pagedd or ~/.cache/pagedd/run",
    )
    http_port: int | None = setting(
        None, "Serve HTTP on this TCP port as well; needs api_key_file.", minimum=1, maximum=65535, none="off"
    )
    http_host: str = setting("127.0.0.1", "Address for http_port; a loopback one without TLS.")
    api_key_file: Path | None = setting(  # noqa: RUF009 (as above)
        None,
        "File with the API keys that TCP clients must show, one a line as `pagedd hash-key NAME` prints it.",
        none="off",
    )
    tls_cert_file: Path | None = setting(  # noqa: RUF009 (as above)
        None,
        "Certificate of http_port and its chain, PEM: TLS 1.2 and up; http_host may then be any address.",
        none="off",
    )
    tls_key_file: Path | None = setting(None, "Its private key, PEM, closed to others.", none="off")  # noqa: RUF009
    # The process
    drain_seconds: float = setting(
        5.0, "How long running requests may go on after the signal to stop.", minimum=0, maximum=3600
    )
    step_timeout_seconds: float = setting(
        120.0, "A step of the engine that takes longer hangs: another engine is started.", minimum=5, maximum=86_400
    )
    load_timeout_seconds: float = setting(
        1800.0, "So long may one part of the engine's load take, a first compilation too.", minimum=1, maximum=86_400
    )
    idle_sleep_seconds: float | None = setting(
        None, "Without a request for so long, the engine sleeps: all its memory is free.", above=0, none="off"
    )
    max_tokens_per_second: float | None = setting(
        None, "Most tokens to compute a second, prompts and outputs together.", above=0, none="off"
    )
    max_tokens_per_second_on_battery: float | None = setting(
        None, "The same while the machine runs on its battery.", above=0, none="off"
    )
    max_tokens_per_second_when_hot: float | None = setting(
        None, "The same from hot_celsius on, until it is 5 degrees cooler.", above=0, none="off"
    )
    hot_celsius: float = setting(90.0, "Of the machine's hottest thermal zone.", minimum=20, maximum=150)
    yield_to: tuple[str, ...] = setting(
        (),
        "Programs that get the device to themselves: while one of that name runs, the engine sleeps, after a load that "
        "is under way.",
        none="nobody",
    )
    yield_below_gib: float | None = setting(
        None,
        "With less free memory on the engine's GPU, others need it: the engine sleeps until it fits again beside that.",
        minimum=0,
        none="off",
    )
    request_log: Path | None = setting(  # noqa: RUF009 (as above)
        None, "File for a line a request, its lengths and when it came: for pagectl replay and tune.", none="off"
    )
    request_log_prompts: bool = setting(False, "Also the prompts in the request log, as token ids.")
    otel_endpoint: str | None = setting(
        None, "URL of an OpenTelemetry collector (OTLP over HTTP) that gets a trace a request; no texts.", none="off"
    )
    log_level: str = setting("info", "Least severe log line to write.", choices=logs.LEVELS)
    log_format: str = setting(
        "auto", "auto is journald under systemd, else human; json is one object a line.", choices=logs.FORMATS
    )
    # Callers, and what they cost
    quota: QuotaConfig = table(QuotaConfig())  # noqa: RUF009 (frozen)
    cost: CostConfig = table(CostConfig())  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        """Checks what one setting's range cannot say. Raises `PageddError("invalid_setting")`."""
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise _invalid("device", self.device, "it is auto, cpu, cuda or cuda:N")
        if self.served_model_name is not None and not is_served_name(self.served_model_name):
            raise _invalid("served_model_name", ascii(self.served_model_name[:64]), SERVED_NAME_RULE)
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            given, absent = ("cert", "key") if self.tls_key_file is None else ("key", "cert")
            value = self.tls_cert_file or self.tls_key_file
            raise _invalid(f"tls_{given}_file", value, f"set tls_{absent}_file as well")
        if self.tls_cert_file is not None and self.http_port is None:
            raise _invalid("tls_cert_file", self.tls_cert_file, "there is nothing to protect; set http_port as well")
        if self.tls_cert_file is None and not _is_loopback(self.http_host):
            raise _invalid(
                "http_host", self.http_host, "it must be a loopback address; set tls_cert_file to serve others"
            )
        if self.http_port is not None and self.api_key_file is None:
            raise _invalid("http_port", self.http_port, "anyone on this machine can connect; set api_key_file as well")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise _invalid(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"it must be at least max_num_seqs, {self.max_num_seqs}, so that every seat can decode in a step",
            )

    def to_engine_config(self, weights: str) -> EngineConfig:
        """The engine's share. `weights` is the path that `model` was resolved to."""
        return EngineConfig(
            model=weights,
            device=self.device,
            dtype=self.dtype,
            weight_dtype=self.weight_dtype,
            async_scheduling=self.async_scheduling,
            enforce_eager=self.enforce_eager,
            kv_cache_dtype=self.kv_cache_dtype,
            kv_quality_check=self.kv_quality_check,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.enable_prefix_caching,
            kv_host_gib=self.kv_host_gib,
            kv_disk_gib=self.kv_disk_gib,
            scheduling_policy=self.scheduling_policy,
            ageing_s_per_point=self.ageing_s_per_point,
            num_speculative_tokens=self.num_speculative_tokens,
            num_threads=self.num_threads,
        )


def load_config(
    argv: list[str],
    environ: Mapping[str, str] = os.environ,
    default_file: Path = DEFAULT_FILE,
    *,
    program: str = "pagedd",
) -> Loaded[DaemonConfig]:
    """See `settings.load_settings`."""
    return load_settings(DaemonConfig, argv, environ, default_file, program=program, other_variables=_OTHER_VARIABLES)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _invalid(name: str, value: object, rule: str) -> PageddError:
    return PageddError("invalid_setting", f"{name} = {value}: {rule}", field=name)
