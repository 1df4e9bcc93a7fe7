"""Ends a text before a stop string, however the text is cut into pieces.

Owns the characters that may yet turn out to belong to a stop string. Knows nothing of tokens.
"""

from collections.abc import Sequence


class StopMatcher:
    """Passes one choice's text through until a stop string is complete.

    The stop string whose last character comes first wins, as if the text came character by character; of those that end
    there, the longest. Each is followed by its own Knuth-Morris-Pratt automaton, so a character costs O(number of
    stops) on average, and what is held back is never longer than the longest stop less one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must hold at least one character")
        # Longest first, so that the first one found complete at a character is the one that counts.
        self._stops = sorted(stops, key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._lengths = [0] * len(stops)  # matched characters of each stop; the text so far ends with them
        self._held = ""  # ends the text so far; as long as the longest of those matches
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """What may be sent of `text` and of what was held back, and the stop string once one is complete.

        After a match nothing more comes out.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._stops:
            return text, None
        for i, character in enumerate(text):
            stop = self._advance(character)
            if stop is not None:
                self._matched = stop
                seen = self._held + text[: i + 1]
                self._held = ""
                return seen[: len(seen) - len(stop)], stop
        seen = self._held + text
        cut = len(seen) - max(self._lengths)
        self._held = seen[cut:]
        return seen[:cut], None

    def finish(self) -> str:
        """What was held back: the text ended, so no stop string can become complete."""
        rest, self._held = self._held, ""
        return rest

    def _advance(self, character: str) -> str | None:
        complete = None
        for k, stop in enumerate(self._stops):
            length = self._lengths[k]
            while length and stop[length] != character:
                length = self._borders[k][length]
            length += stop[length] == character
            self._lengths[k] = length
            if complete is None and length == len(stop):
                complete = stop
        return complete


def _borders(word: str) -> list[int]:
    """[n] = length of the longest proper prefix of `word[:n]` that is also its suffix."""
    borders = [0] * (len(word) + 1)
    length = 0
    for n in range(1, len(word)):
        while length and word[n] != word[length]:
            length = borders[length]
        length += word[n] == word[length]
        borders[n + 1] = length
    return borders
