"""Messages to token ids, by the model's own chat template.

Owns the border between what the template writes and what people write: only the template's text can become control
tokens. What a template may call is `template_environment.py`'s; how one that is not known is kept within bounds,
`template_worker.py`'s.
"""

import hashlib
import re
import secrets
from typing import Any

import jinja2

from pagedd.client.errors import PageddError
from pagedd.daemon.prepared import PreparedModel
from pagedd.daemon.text.template_environment import compile_template, describe, render_bounded
from pagedd.daemon.text.template_worker import TemplateWorker
from pagedd.daemon.text.tokenizer import TextTokenizer, any_of

# sha256 of templates that were read by a person and do work in proportion to the messages: they need no process.
_KNOWN_TEMPLATES = frozenset({"872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788"})  # SmolLM2-Instruct


class ChatTemplate:
    """The chat template of a prepared model.

    Any thread may call it. A template that is not known runs in a process of its own; `encode_chat` then blocks up to
    `template_worker.MAX_WAIT_SECONDS`, so an event loop calls it in a thread.
    """

    def __init__(self, prepared: PreparedModel, tokenizer: TextTokenizer) -> None:
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._marker = _Marker(prepared.special_tokens)
        self._known: jinja2.Template | None = None
        self._worker: TemplateWorker | None = None
        if prepared.chat_template is not None:
            if hashlib.sha256(prepared.chat_template.encode()).hexdigest() in _KNOWN_TEMPLATES:
                self._known = compile_template(prepared.chat_template)
            else:
                self._worker = TemplateWorker(prepared.chat_template)

    def encode_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of the conversation, with one beginning-of-sequence id if the model wants one.

        Args:
            messages: JSON objects as the template expects them, `role` and `content` at least.
            add_generation_prompt: end with what makes the model answer as the assistant.

        Raises:
            PageddError: `empty_messages`; `no_chat_template`; `template_error` with the template's own message, or with
                the bound that it met.
        """
        if not messages:
            raise PageddError("empty_messages", "0 messages, at least 1; send one with role user", field="messages")
        rendered = self._render(
            {
                **self._prepared.template_variables,
                "messages": self._marker.mark(messages),
                "add_generation_prompt": add_generation_prompt,
                "tools": None,
                "documents": None,
            }
        )
        ids = self._tokenizer.encode_marked(rendered, self._marker.text)
        bos = self._prepared.bos_token_id
        if self._prepared.adds_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def close(self) -> None:
        """Ends the template's process, if there is one."""
        if self._worker is not None:
            self._worker.close()

    def _render(self, variables: dict[str, Any]) -> str:
        try:
            if self._worker is not None:
                return self._worker.render(variables)
            if self._known is not None:
                return render_bounded(self._known, variables)
        except PageddError as error:
            error.field = "messages"
            raise
        except Exception as error:  # what a template raises depends on the messages, e.g. TypeError for content null
            raise PageddError("template_error", describe(error), field="messages") from error
        message = "this model has no chat template, so pagedd cannot tell its turns apart; send a plain prompt instead"
        raise PageddError("no_chat_template", message, field="messages")


class _Marker:
    """Interrupts what spells a control token in the messages, before the template sees them.

    `text`, random digits, is put after the first character of each spelling, and after the first character of one that
    only begins at the end of a string: another string may complete it. A spelling that the rendered text holds
    uninterrupted is therefore the template's. Letter case is not regarded, because a template may change it. Messages
    that spell no control token reach the template as they are.
    """

    def __init__(self, special_tokens: dict[str, int]) -> None:
        self.text = "".join(secrets.choice("0123456789") for _ in range(40))
        self._longest = max(map(len, special_tokens), default=0)
        beginnings = {text[:length] for text in special_tokens for length in range(1, len(text))}
        self._begun = re.compile(f"(?:{any_of(beginnings)})\\Z", re.IGNORECASE)
        # Consumes one character, so that a spelling that overlaps another is found too.
        self._whole = re.compile(f"(?={any_of(special_tokens)}).", re.IGNORECASE | re.DOTALL)

    def mark(self, value: Any) -> Any:
        """A copy of the JSON `value` with every string in it marked, keys too."""
        match value:
            case str():
                return self._mark_string(value)
            case list():
                return [self.mark(element) for element in value]
            case dict():
                return {self.mark(key): self.mark(element) for key, element in value.items()}
            case _:
                return value

    def _mark_string(self, string: str) -> str:
        end = len(string.rstrip())  # a template may trim it
        begun = self._begun.search(string, max(0, end - self._longest), end)
        if begun is not None:
            cut = begun.start() + 1
            string = string[:cut] + self.text + string[cut:]
        return self._whole.sub(lambda match: match.group() + self.text, string)
