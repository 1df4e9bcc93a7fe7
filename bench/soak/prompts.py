"""Prompts that begin alike and are never the same: a request that is in two engines' deaths is refused as poison."""

import random

_SYSTEM = "You are a patient librarian who knows every shelf of a large house of books. " * 4
_WORDS = ("river", "stone", "lamp", "cloud", "paper", "wheel", "garden", "window", "copper", "north", "bridge", "salt")


def text(draw: random.Random) -> str:
    """Of a few to two hundred tokens."""
    words = " ".join(draw.choices(_WORDS, k=draw.choice((3, 20, 100))))
    beginning = _SYSTEM if draw.random() < 0.4 else ""
    return f"{beginning}{draw.getrandbits(64):x} {words}"
