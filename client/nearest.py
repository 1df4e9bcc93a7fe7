"""The known word that is nearest to one that is not: what whoever mistyped it is told."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """None when all are far."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)), None)


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """A question, or `otherwise` where there is nothing to ask."""
    found = nearest(word, known)
    return otherwise if found is None else f"did you mean {found}?"
