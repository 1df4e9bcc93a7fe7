"""The served model as the front sees it: its name, its facts, prompts as token ids and ids as text.

Owns where text is tokenized: short prompts in the event loop, long ones and chats in threads beside it. What a prompt
may hold is `admission.py`'s, how it becomes ids `text/`'s.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from pagedd.client.protocol import Chat, Generate
from pagedd.daemon.model_use import ModelUse
from pagedd.daemon.prepared import load_prepared
from pagedd.daemon.text.chat_template import ChatTemplate
from pagedd.daemon.text.tokenizer import TextTokenizer

T = TypeVar("T")

# Shorter texts are tokenized where they arrive: a thread would cost more than the work.
_INLINE_TEXT_CHARS = 2048
_INLINE_TOKENS = 1024
_MAX_THREADS = 2


class ServedModel:
    """One prepared model.

    Attributes:
        name: under which clients ask for it.
        max_token_bytes: length of the longest token.
    """

    def __init__(self, folder: Path, name: str | None) -> None:
        """Reads files for some tenths of a second. `name` None is the model's own.

        Raises `PageddError("unsupported_model")` for a tokenizer that cannot be handled exactly.
        """
        self.prepared = load_prepared(folder)
        self._use = ModelUse(Path(self.prepared.weights))
        # A file's name may hold anything.
        self.name = name or "".join(char if char.isprintable() else "?" for char in self.prepared.name)
        self.tokenizer = TextTokenizer(folder, self.prepared)
        token_ids = range(self.tokenizer.vocab_size)
        self.max_token_bytes = max(1, *(len(self.tokenizer.token_bytes(token_id)) for token_id in token_ids))
        self._chat_template = ChatTemplate(self.prepared, self.tokenizer)
        self._text_threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="text")
        # Their own, because a template may take its time and they wait for one another.
        self._chat_threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="chat")

    async def prompt_token_ids(self, message: Generate | Chat) -> list[int]:
        """Ids of a message's prompt. Raises `PageddError` when the chat template refuses."""
        if isinstance(message, Chat):
            turns = msgspec.to_builtins(message.messages)
            return await _in(self._chat_threads, lambda: self._chat_template.encode_chat(turns))
        if message.prompt_token_ids is not None:
            return message.prompt_token_ids
        text = message.prompt or ""

        def encode() -> list[int]:
            return self.tokenizer.encode(text, parse_special=message.parse_special)

        return encode() if len(text) <= _INLINE_TEXT_CHARS else await _in(self._text_threads, encode)

    async def text_of(self, token_ids: list[int]) -> str:
        """Control tokens are spelled out."""

        def decode() -> str:
            return self.tokenizer.decode(token_ids, skip_special=False)

        return decode() if len(token_ids) <= _INLINE_TOKENS else await _in(self._text_threads, decode)

    async def retire(self) -> None:
        """`close`, once what is in the threads has ended."""
        for threads in (self._text_threads, self._chat_threads):
            await asyncio.to_thread(threads.shutdown)
        self.close()

    def close(self) -> None:
        """Ends threads and the template's process; what waits in them is dropped. The model may be removed then."""
        for threads in (self._text_threads, self._chat_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self._chat_template.close()
        self._use.close()


async def _in(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)
