"""Who has a seat: the queue, admission, room for tokens, preemption, and waiting for a prefix that another computes.

The most urgent sequence can always take blocks from the least urgent one, so some sequence advances in every step; a
victim is recomputed later, mostly from the cache. Who begins like a prompt that is being computed waits for its blocks
without a seat, and lends it its urgency. While a step is on its way nobody is preempted, for it may still write.

Owns running and waiting sequences. What a step holds is `scheduler.py`'s; who is more urgent, `policy.py`'s.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal

from pagedd.engine.config import SchedulerConfig
from pagedd.engine.counters import SchedulerCounters
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.kv.prefix_cache import CachedBlock
from pagedd.engine.kv.prefix_in_flight import PrefixesInFlight
from pagedd.engine.policy import WaitingQueue, urgency
from pagedd.engine.request import Preemption
from pagedd.engine.sequence import Sequence, SequenceState
from pagedd.engine.step import Step


class Seats:
    """Seats and blocks, and the sequences that have or want them.

    Attributes:
        running: the sequences that have a seat, most urgent first.
        preemptions: of the step that is being formed, or of the last one.
        wants_blocks_back: that step had no room for somebody who may take it from others, once nothing is on its way.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        counters: SchedulerCounters,
        clock: Callable[[], float],
    ) -> None:
        self.running: list[Sequence] = []
        self.preemptions: list[Preemption] = []
        self.wants_blocks_back = False
        self._config = config
        self._blocks = blocks
        self._counters = counters
        self._clock = clock
        self._waiting = WaitingQueue()
        self._in_flight = PrefixesInFlight(blocks)
        self._awaiting: dict[Sequence, tuple[Sequence, int]] = {}  # for whom, and the end of the blocks it waits for
        self._lent: dict[Sequence, tuple[int, float]] = {}  # own priority and due time of those who are waited for
        self._admitted: set[Sequence] = set()  # in the step that is being formed
        self._owed_blocks: int | None = None  # in that step, once it has been counted
        self._is_ahead = False

    # --- between steps ------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._awaiting)

    @property
    def num_awaiting_prefix(self) -> int:
        """Of those that wait: no seat or block would help them now."""
        return len(self._awaiting)

    def enqueue(self, sequence: Sequence) -> None:
        """Waits for a seat from now on."""
        self._waiting.push(sequence)

    def seat(self, sequence: Sequence) -> None:
        """Runs from now on, with the blocks that it has; there must be a seat left."""
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=urgency)

    def leave(self, sequence: Sequence) -> None:
        """Gives up its seat, or its place among those that wait; blocks are the caller's business."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._awaiting.pop(sequence, None)
        self._in_flight.remove(sequence)

    def has_computed_prompt(self, sequence: Sequence) -> None:
        """Nobody waits for its prefix any more: it is all in the cache."""
        self._in_flight.remove(sequence)

    def set_urgency(self, sequence: Sequence, priority: int, due: float) -> None:
        """Its own; what is lent to it, and what it lends, follows."""
        self._lent.pop(sequence, None)
        sequence.priority, sequence.due_s = priority, due
        if sequence in self._waiting:
            self._waiting.push(sequence)
        self._lend_anew()

    # --- a step is formed ---------------------------------------------------------------------------------------------

    def begin_step(self, *, is_ahead: bool) -> None:
        """`is_ahead`: the step before is still on its way."""
        self._is_ahead = is_ahead
        self.preemptions = []
        self.wants_blocks_back = False
        self._owed_blocks = None
        self._admitted.clear()
        if self._blocks.reads:
            for sequence in self._blocks.take_reads():
                self._note_start(sequence)
        self._wake()

    def most_urgent_waiting(self) -> Sequence | None:
        return self._waiting.peek()

    def decoding_and_prefilling(self) -> tuple[list[Sequence], deque[Sequence]]:
        """Running sequences that decode, and those that prefill, most urgent first.

        Not those certain to end, nor those that wait for the disk.
        """
        decoding: list[Sequence] = []
        prefilling: deque[Sequence] = deque()
        reads = self._blocks.reads
        for sequence in self.running:
            if (self._is_ahead and sequence.has_all_tokens) or sequence in reads:
                continue
            if sequence.is_decoding:
                decoding.append(sequence)
            else:
                prefilling.append(sequence)
        return decoding, prefilling

    def next_prefill(self, running: deque[Sequence], step: Step) -> Sequence | None:
        """The most urgent of those that prefill already (`running`) and those that wait, admitted.

        Nobody overtakes one that could not be admitted, but those that have seats go on.
        """
        is_refused = False
        while True:
            candidate = None if is_refused else self._waiting.peek()
            if candidate is not None and (not running or urgency(candidate) < urgency(running[0])):
                if self._admit(candidate, step):
                    return candidate
                is_refused = candidate in self._waiting  # else it waits for a prefix or the disk, and nobody for it
            elif running:
                sequence = running.popleft()
                # Else a more urgent one of this step took its blocks, and it may have been admitted once more since.
                if sequence.state is SequenceState.RUNNING and sequence not in self._admitted:
                    return sequence
            else:
                return None

    def is_shorter_next(self, running: deque[Sequence], sequence: Sequence) -> bool:
        candidates = [s for s in (running[0] if running else None, self._waiting.peek()) if s is not None]
        return bool(candidates) and min(candidates, key=urgency).num_uncomputed_tokens < sequence.num_uncomputed_tokens

    def grow(self, sequence: Sequence, num_tokens: int, step: Step) -> bool:
        """Room for the next `num_tokens` of a running sequence, if need be at the cost of less urgent running ones.

        One that finds no room keeps its blocks and sits this step out; only a more urgent one may take them, and not
        while a step is on its way.
        """
        target = sequence.num_computed_tokens + num_tokens
        if self._blocks.has_room(sequence, target):
            return True
        owed = 0 if self._owed_blocks is None else self._owed_to(sequence)
        while (copies := self._blocks.grow(sequence, target)) is None:
            victim = self.running[-1]
            self.wants_blocks_back |= self._is_ahead
            if victim is sequence or self._is_ahead:
                return False
            self._preempt(victim, step, sequence, "blocks")
        step.block_copies += copies
        if self._owed_blocks is not None:
            self._owed_blocks += self._owed_to(sequence) - owed
        return True

    def _admit(self, sequence: Sequence, step: Step) -> bool:
        """Gives a waiting sequence a seat and its cached prefix, if all of its tokens can be computed in what is idle.

        True when it can begin: with a part of its prefix on the disk it has its seat, but has to wait for that.
        More urgent arrivals may take seat and blocks from running sequences of lower priority.
        """
        lacking_seats = len(self.running) + 1 - self._config.max_num_seqs
        if lacking_seats > 0 and self._victims_for(sequence, [], lacking_seats, 0) is None:
            return False  # before the look-up, whose cost grows with the prompt and would be paid at every step
        prefix = self._blocks.find_prefix(sequence)
        if (computed := self._in_flight.find(sequence, len(prefix))) is not None:
            self._await(sequence, *computed)
            return False
        wanted = self._blocks.num_blocks_for(sequence.num_tokens) - len(prefix) + self.num_owed_blocks()
        lacking_blocks = wanted - self._blocks.num_idle_after(prefix)
        if self.running and (lacking_seats > 0 or lacking_blocks > 0):
            victims = self._victims_for(sequence, prefix, lacking_seats, lacking_blocks)
            if victims is None:
                return False
            if self._is_ahead:
                self.wants_blocks_back = True
                return False
            for victim in victims:
                self._preempt(victim, step, sequence, "seat" if lacking_seats > 0 else "blocks")
            prefix = self._blocks.find_prefix(sequence)
        self._waiting.remove(sequence)
        self._blocks.attach(sequence, prefix)
        self._admitted.add(sequence)
        self.seat(sequence)
        if self._owed_blocks is not None:
            self._owed_blocks += self._owed_to(sequence)
        if self._config.enable_prefix_caching:
            self._in_flight.add(sequence)
        if sequence in self._blocks.reads:
            return False
        self._note_start(sequence)
        return True

    def _await(self, sequence: Sequence, writer: Sequence, end_block: int) -> None:
        """Leaves the queue until `writer` has computed its blocks up to `end_block`, as urgently as `sequence` is."""
        self._waiting.remove(sequence)
        self._awaiting[sequence] = (writer, end_block)
        if self._lend(sequence, writer):
            self.running.sort(key=urgency)

    def _wake(self) -> None:
        """Back into the queue go those whose blocks are there, or will not come; and lent urgency to who lent it."""
        for sequence, (writer, end_block) in list(self._awaiting.items()):
            if writer.state is not SequenceState.RUNNING or writer.num_indexed_blocks >= end_block:
                del self._awaiting[sequence]
                self._waiting.push(sequence)
        if self._lent:
            self._lend_anew()

    def _lend(self, sequence: Sequence, writer: Sequence) -> bool:
        """Makes `writer` as urgent as `sequence`, which waits for it; False where it is that already."""
        if urgency(sequence) >= urgency(writer):
            return False
        self._lent.setdefault(writer, (writer.priority, writer.due_s))
        writer.priority, writer.due_s = max(writer.priority, sequence.priority), sequence.due_s
        return True

    def _lend_anew(self) -> None:
        """Those who are waited for become as urgent as the most urgent who waits; nobody else but by itself."""
        for writer, (priority, due) in self._lent.items():
            writer.priority, writer.due_s = priority, due
        own, self._lent = self._lent, {}
        for sequence, (writer, _) in self._awaiting.items():
            self._lend(sequence, writer)
        for writer in own:
            if writer in self._waiting:
                self._waiting.push(writer)
        self.running.sort(key=urgency)

    def _victims_for(
        self, sequence: Sequence, prefix: list[CachedBlock], num_seats: int, num_blocks: int
    ) -> list[Sequence] | None:
        """The least urgent running sequences whose end would make room; `None` when even all of them would not.

        `prefix` will be held by `sequence` itself.
        """
        victims: list[Sequence] = []
        given_back = Counter({entry.block_id: -1 for entry in prefix})
        for victim in reversed(self.running):
            if num_seats <= 0 and num_blocks <= 0:
                break
            if victim.priority >= sequence.priority or urgency(victim) < urgency(sequence):
                return None
            victims.append(victim)
            num_seats -= 1
            num_blocks -= self._blocks.num_freed_by(victim, given_back)
            num_blocks -= self._owed_to(victim)
        return victims if num_seats <= 0 and num_blocks <= 0 else None

    def _preempt(self, victim: Sequence, step: Step, by: Sequence, for_what: Literal["seat", "blocks"]) -> None:
        """Takes seat and blocks of a running sequence. It is recomputed later; its caller sees nothing but time."""
        step.scheduled = [item for item in step.scheduled if item.sequence is not victim]
        held = set(victim.block_table)
        step.block_copies = [copy for copy in step.block_copies if copy[1] not in held]
        victim.num_recompute_tokens = max(victim.num_recompute_tokens, victim.num_computed_tokens)
        victim.num_preemptions += 1
        victim.state = SequenceState.PREEMPTED
        self._counters.preemptions += 1
        self.preemptions.append(
            Preemption(
                request_id=victim.request.request_id,
                choice_index=victim.choice_index,
                by_request_id=by.request.request_id,
                for_what=for_what,
            )
        )
        self._in_flight.remove(victim)
        self._owed_blocks = None
        self._blocks.release(victim)
        self.running.remove(victim)
        self._waiting.push(victim)

    def _note_start(self, sequence: Sequence) -> None:
        if sequence.started_s is None:
            sequence.started_s = self._clock()
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self._blocks.note_start(sequence)
            self._counters.prefix_queries += sequence.num_prompt_tokens
            self._counters.prefix_hits += sequence.num_cached_tokens

    def guesses_took_blocks(self) -> None:
        """What is owed has to be counted again."""
        self._owed_blocks = None

    def num_owed_blocks(self) -> int:
        """What running sequences will soon need. Counted once a step, and kept up to date from there on."""
        if self._owed_blocks is None:
            self._owed_blocks = sum(map(self._owed_to, self.running))
        return self._owed_blocks

    def _owed_to(self, sequence: Sequence) -> int:
        """Prefills need the rest of their prompts, decodes a block each."""
        return self._blocks.num_missing_blocks(sequence, len(sequence.token_ids)) or 1
