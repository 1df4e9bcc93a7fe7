"""Questions about text that need no engine: the token ids of a prompt, the text of token ids.

Owns their bounds. While one is worked on it counts like a request, in its caller's quota and in the queue. What text
and ids become is `served_model.py`'s.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pagedd.client.errors import PageddError
from pagedd.client.protocol import Chat, Generate
from pagedd.daemon import admission
from pagedd.daemon.caller import Caller
from pagedd.daemon.config import DaemonConfig
from pagedd.daemon.metering import Metering
from pagedd.daemon.served_model import ServedModel


class TextQuestions:
    """One event loop; long texts are worked on beside it.

    Args:
        served_model: what is served now; raises `PageddError` when nothing is.
        check_queue: whether so many more requests may wait; raises `PageddError` when they may not.
    """

    def __init__(
        self,
        config: DaemonConfig,
        metering: Metering,
        served_model: Callable[[], ServedModel],
        check_queue: Callable[[int], None],
    ) -> None:
        self._config = config
        self._metering = metering
        self._served_model = served_model
        self._check_queue = check_queue
        self._num_under_way = 0

    async def tokenize(self, message: Generate | Chat, caller: Caller) -> list[int]:
        """The prompt's ids, as a request with the same fields would have them. Raises `PageddError`."""
        model = self._served_model()
        admission.check_message(message, model.name)
        admission.check_text_length(message, model.max_token_bytes, self._max_model_len(model))
        with self._place(caller):
            return await model.prompt_token_ids(message)

    async def detokenize(self, token_ids: list[int], caller: Caller) -> str:
        """Text of `token_ids`, control tokens spelled out. Raises `PageddError`."""
        model = self._served_model()
        if len(token_ids) > (most := self._max_model_len(model)):
            raise PageddError(
                "invalid_value",
                f"tokens has {len(token_ids)} items; accepted: at most {most}, the context; send them in parts",
                field="tokens",
            )
        admission.check_vocabulary("tokens", token_ids, model.tokenizer.vocab_size)
        with self._place(caller):
            return await model.text_of(token_ids)

    @contextmanager
    def _place(self, caller: Caller) -> Iterator[None]:
        self._check_queue(self._num_under_way + 1)
        with self._metering.in_flight(caller):
            self._num_under_way += 1
            try:
                yield
            finally:
                self._num_under_way -= 1

    def _max_model_len(self, model: ServedModel) -> int:
        context = model.prepared.context_length
        return min(context, self._config.max_model_len or context)
