"""Closing what was opened on top of another screen."""

from typing import TypeVar

from textual.screen import Screen

_Result = TypeVar("_Result")


def close(screen: Screen[_Result], result: _Result | None = None) -> None:
    """Once, however many keys that close it came before it was gone: another would close what is below."""
    if screen.is_active:
        screen.dismiss(result)
