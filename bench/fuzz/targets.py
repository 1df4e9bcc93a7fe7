"""All readers, by name."""

from collections.abc import Mapping

from pagedd.bench.fuzz import gguf_files, http_bodies, http_heads, messages, model_folders, settings_files, zmtp_bytes
from pagedd.bench.fuzz.target import Target

TARGETS: Mapping[str, Target] = {
    module.__name__.rpartition(".")[2]: module.TARGET
    for module in (messages, http_bodies, http_heads, gguf_files, model_folders, settings_files, zmtp_bytes)
}
