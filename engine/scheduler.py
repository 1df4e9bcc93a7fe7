"""What runs in each step: seats, token budget, chunks, admission and preemption.

Owns every `Sequence` and the only `BlockManager`. Doesn't know models, tensors or sockets: a step goes out
(`schedule`), drawn tokens come back (`commit`). Who is more urgent is said in `policy.py`; blocks are in
`kv/block_manager.py`.

A step is formed anew each time. Running sequences that decode come first; what is left of the token budget goes to
prefill chunks, running and newly admitted, in order of urgency. The most urgent running sequence can always take blocks
from the least urgent one, so some sequence advances in every step.

A device that works by itself need not wait for this: while a step is on its way, `assume` goes on as if it had come
back, with `PENDING` for what it draws, and the next one is formed. Nobody is preempted in that one, and blocks that are
released stay out of the pool until the steps that name them have finished (`BlockManager.hold_releases`).

Who begins like a prompt that is being computed waits for its blocks, without a seat, and lends it its urgency.
"""

import itertools
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from pagedd.engine.config import SchedulerConfig
from pagedd.engine.errors import EngineError
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.kv.prefix_in_flight import PrefixesInFlight
from pagedd.engine.policy import WaitingQueue, due_s, urgency
from pagedd.engine.request import FinishReason, Preemption, Request, SequenceOutput
from pagedd.engine.sequence import PENDING, Sequence, SequenceState
from pagedd.engine.speculation import PromptLookup
from pagedd.engine.step import Sampled, ScheduledSequence, Step
from pagedd.engine.token_budget import TokenBudget


@dataclass(slots=True, eq=False)
class _Group:
    """The live choices of one request. `unforked` ones wait for the first to complete the prompt they share."""

    live: dict[int, Sequence]
    unforked: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start; defined in `stats.py`."""

    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Scheduler:
    """Continuous batching over one pool of blocks.

    Args:
        blocks: the pool, empty.
        clock: seconds, monotonic; replaceable so that tests decide what time it is.
    """

    def __init__(
        self, config: SchedulerConfig, blocks: BlockManager, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.counters = SchedulerCounters()
        self.num_scheduled_tokens = 0
        self.preemptions: list[Preemption] = []  # of the last step
        self._clock = clock
        self._groups: dict[str, _Group] = {}
        self._running: list[Sequence] = []  # most urgent first
        self._waiting = WaitingQueue()
        self._in_flight = PrefixesInFlight(blocks)
        self._awaiting: dict[Sequence, tuple[Sequence, int]] = {}  # for whom, and the end of the blocks it waits for
        self._lent: dict[Sequence, tuple[int, float]] = {}  # own priority and due time of those who are waited for
        self._orders = itertools.count()
        self._lookup = PromptLookup(config.num_speculative_tokens)
        self.budget = TokenBudget(config.max_num_batched_tokens)
        self._assumed: Step | None = None
        self._admitted: set[Sequence] = set()  # in the step that is being formed
        self._owed_blocks: int | None = None  # within `schedule`, once it has been counted
        self._wants_blocks_back = False  # the last step had no room for somebody who may take it from others

    # --- requests come and go -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            EngineError: `duplicate_request`, `empty_prompt`, `prompt_too_long`, or `exceeds_kv_pool` for one that could
                not fit the pool even alone.
        """
        self._refuse_unservable(request)
        now = self._clock()
        ranked = self.config.scheduling_policy == "priority"
        due = due_s(now, request.priority if ranked else 0, self.config.ageing_s_per_point)
        choices = [
            Sequence(
                request=request,
                choice_index=i,
                token_ids=list(request.prompt_token_ids),
                num_prompt_tokens=len(request.prompt_token_ids),
                arrival_s=now,
                due_s=due,
                order=next(self._orders),
                priority=request.priority if ranked else 0,
            )
            for i in range(request.params.n)
        ]
        self._groups[request.request_id] = _Group({c.choice_index: c for c in choices}, choices[1:])
        self._waiting.push(choices[0])

    def abort(self, request_id: str, choice_index: int | None = None) -> bool:
        """Ends a request, or one choice of it, without a word. Its blocks are idle when this returns.

        False when nothing of that name is live.
        """
        group = self._groups.get(request_id)
        if group is None:
            return False
        doomed = [c for c in group.live.values() if choice_index is None or c.choice_index == choice_index]
        for sequence in doomed:
            if sequence in group.unforked:
                group.unforked.remove(sequence)
            self._finish(sequence)
        leader_is_gone = group.unforked and all(c in group.unforked for c in group.live.values())
        if leader_is_gone:
            self._waiting.push(group.unforked.pop(0))
        return bool(doomed)

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Changes how urgent a live request is. False when no request of that id is live."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        if self.config.scheduling_policy == "priority":
            for sequence in group.live.values():
                due = due_s(sequence.arrival_s, priority, self.config.ageing_s_per_point)
                if sequence in self._lent:
                    self._lent[sequence] = priority, due
                    continue
                sequence.priority, sequence.due_s = priority, due
                if sequence in self._waiting:
                    self._waiting.push(sequence)
            self._running.sort(key=urgency)
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The sequences that have a seat, most urgent first."""
        return tuple(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._awaiting)

    @property
    def oldest_wait_s(self) -> float:
        """Seconds that the longest-waiting, never started sequence has waited; 0 when none waits."""
        arrivals = (s.arrival_s for s in (*self._waiting, *self._awaiting) if s.state is SequenceState.WAITING)
        return self._clock() - min(arrivals, default=self._clock())

    def live_sequences(self) -> Iterator[Sequence]:
        """Every sequence that has not finished, in order of arrival of their requests."""
        for group in self._groups.values():
            yield from group.live.values()

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when blocks, index and block tables contradict each other."""
        self.blocks.check_integrity(self.live_sequences())

    # --- a step goes out ----------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Forms the next batch. Empty only when nothing is live, or when all of it depends on a step not yet back."""
        step = Step(number=self.counters.steps)
        self.preemptions = []
        self._wants_blocks_back = False
        self._owed_blocks = None
        self._admitted.clear()
        self._wake()
        decoding, prefilling = self._seated()
        budget = self._schedule_decodes(step, decoding, prefilling)
        self._schedule_prefills(step, budget, prefilling)
        self.num_scheduled_tokens = step.num_scheduled_tokens
        self.counters.steps += bool(step.scheduled)
        return step

    def can_run_ahead(self, step: Step) -> bool:
        """Whether the next step may be formed while `step`, the only one on its way, is not back.

        Not when somebody wants blocks or a seat that others hold. Nor when what comes next depends on the tokens
        themselves: on guesses, penalties, or choices that begin with a finished prompt.
        """
        return not self._wants_blocks_back and all(
            not item.draft_token_ids
            and len(item.samplers) <= 1
            and not (item.samplers and item.sequence.request.params.needs_token_counts)
            for item in step.scheduled
        )

    def assume(self, step: Step) -> None:
        """Goes on as if `step` had come back. `commit` or `withdraw` must follow once it has, or failed."""
        self._assumed = step
        for item in step.scheduled:
            if item.sequence.state is not SequenceState.FINISHED:
                item.sequence.num_computed_tokens = item.start + item.num_scheduled_tokens
                item.sequence.token_ids += [PENDING] * len(item.samplers)

    def withdraw(self, step: Step) -> None:
        """Takes back what `assume` may have said of a step that failed. Nothing formed since may be on its way."""
        assumed, self._assumed = self._assumed, None
        for item in step.scheduled if assumed is step else ():
            if item.sequence.state is not SequenceState.FINISHED:
                item.sequence.num_computed_tokens = item.start
                del item.sequence.token_ids[len(item.sequence.token_ids) - len(item.samplers) :]

    def _seated(self) -> tuple[list[Sequence], deque[Sequence]]:
        """Running sequences that decode, and those that prefill, most urgent first; not those certain to end."""
        decoding: list[Sequence] = []
        prefilling: deque[Sequence] = deque()
        for sequence in self._running:
            if self._assumed is None or not sequence.has_all_tokens:
                (decoding if sequence.is_decoding else prefilling).append(sequence)
        return decoding, prefilling

    def _schedule_decodes(self, step: Step, decoding: list[Sequence], prefilling: deque[Sequence]) -> int:
        """A token each; returns what is left of the budget."""
        budget = self.budget.tokens
        prompts = [s for s in (self._waiting.peek(), prefilling[0] if prefilling else None) if s is not None]
        # A prompt that is more urgent than somebody who decodes must not wait until decodes leave it a token.
        presses = bool(decoding and prompts) and urgency(min(prompts, key=urgency)) < urgency(decoding[-1])
        num_kept = int(presses and budget > 1)
        for sequence in decoding:
            if budget > num_kept and sequence.state is SequenceState.RUNNING and self._grow(sequence, 1, step):
                self._enter(step, sequence, 1)
                budget -= 1
        return budget - (self._add_guesses(step, budget) if self._assumed is None else 0)

    def _add_guesses(self, step: Step, budget: int) -> int:
        """Lets the step's sequences, each with its token, compute guesses as well; returns how many in all.

        Prompts keep half of the budget, and nobody loses a block: guesses only take what running sequences don't need.
        """
        if self.config.num_speculative_tokens == 0:
            return 0
        num_left, decodes = budget // 2, list(step.scheduled)
        num_spare_blocks = self.blocks.pool.num_idle - self._num_owed_blocks()
        num_guesses = 0
        for index, item in enumerate(decodes):
            sequence, end = item.sequence, item.start + 1
            num_slots = (len(sequence.block_table) + max(0, num_spare_blocks)) * self.blocks.block_size - end
            fair = -(-num_left // (len(decodes) - index))
            remaining = sequence.request.params.max_tokens - sequence.num_output_tokens - 1
            draft = self._lookup.propose(sequence, min(fair, num_slots, remaining), len(decodes))
            if not draft:
                continue
            num_spare_blocks -= self.blocks.num_missing_blocks(sequence, end + len(draft))
            self.blocks.grow(sequence, end + len(draft))
            self._owed_blocks = None
            item.num_scheduled_tokens += len(draft)
            item.draft_token_ids = draft
            num_left -= len(draft)
            num_guesses += len(draft)
        return num_guesses

    def _num_owed_blocks(self) -> int:
        """What running sequences will soon need. Counted once a step, and kept up to date from there on."""
        if self._owed_blocks is None:
            self._owed_blocks = sum(map(self._owed_to, self._running))
        return self._owed_blocks

    def _owed_to(self, sequence: Sequence) -> int:
        """Prefills need the rest of their prompts, decodes a block each."""
        return max(1, self.blocks.num_missing_blocks(sequence, sequence.num_tokens))

    def _schedule_prefills(self, step: Step, budget: int, running: deque[Sequence]) -> None:
        """`running`: sequences that prefill already; they and admitted ones share `budget`."""
        halved: ScheduledSequence | None = None
        num_preemptions = len(self.preemptions)
        while budget > 0 and (sequence := self._next_prefill(running, step)) is not None:
            chunk = min(sequence.num_uncomputed_tokens, budget)
            # A long prompt shares the budget with a shorter one behind it, whose first token is a few chunks away.
            shares = halved is None and chunk == budget > 1 and self._is_shorter_next(running, sequence)
            if shares:
                chunk -= chunk // 2
            if self._grow(sequence, chunk, step):
                self._enter(step, sequence, chunk)
                halved = step.scheduled[-1] if shares else halved
                budget -= chunk
            if len(self.preemptions) > num_preemptions:  # somebody left the step
                num_preemptions = len(self.preemptions)
                budget = self.budget.tokens - step.num_scheduled_tokens
        if halved is not None and halved in step.scheduled and budget > 0:
            self._extend(step, halved, budget)

    def _is_shorter_next(self, running: deque[Sequence], sequence: Sequence) -> bool:
        candidates = [s for s in (running[0] if running else None, self._waiting.peek()) if s is not None]
        return bool(candidates) and min(candidates, key=urgency).num_uncomputed_tokens < sequence.num_uncomputed_tokens

    def _extend(self, step: Step, item: ScheduledSequence, budget: int) -> None:
        """Gives a chunk that was halved what nobody else took."""
        chunk = min(item.sequence.num_uncomputed_tokens, item.num_scheduled_tokens + budget)
        if self._grow(item.sequence, chunk, step):
            step.scheduled.remove(item)
            self._enter(step, item.sequence, chunk)

    def _next_prefill(self, running: deque[Sequence], step: Step) -> Sequence | None:
        """The most urgent of those that prefill already (`running`) and those that wait, admitted.

        Nobody overtakes one that could not be admitted, but those that have seats go on.
        """
        candidate = self._waiting.peek()
        overtakes = candidate is not None and (not running or urgency(candidate) < urgency(running[0]))
        if candidate is not None and overtakes:
            if self._admit(candidate, step):
                return candidate
            if candidate not in self._waiting:  # it waits for a prefix, and nobody for it
                return self._next_prefill(running, step)
        while running:
            sequence = running.popleft()
            # Else a more urgent one of this step took its blocks, and it may have been admitted once more since.
            if sequence.state is SequenceState.RUNNING and sequence not in self._admitted:
                return sequence
        return self._next_prefill(running, step) if candidate is not None and not overtakes else None

    def _enter(self, step: Step, sequence: Sequence, num_tokens: int) -> None:
        item = ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens)
        if num_tokens >= sequence.num_uncomputed_tokens:
            item.samplers = [sequence]
            if sequence.num_output_tokens == 0:
                item.samplers += self._groups[sequence.request.request_id].unforked
        step.scheduled.append(item)

    def _grow(self, sequence: Sequence, num_tokens: int, step: Step) -> bool:
        """Room for the next `num_tokens` of a running sequence, if need be at the cost of less urgent running ones.

        One that finds no room keeps its blocks and sits this step out; only a more urgent one may take them, and not
        while a step is on its way.
        """
        target = sequence.num_computed_tokens + num_tokens
        owed = self._owed_to(sequence) if self._owed_blocks is not None else 0
        while (copies := self.blocks.grow(sequence, target)) is None:
            victim = self._running[-1]
            self._wants_blocks_back |= self._assumed is not None
            if victim is sequence or self._assumed is not None:
                return False
            self._preempt(victim, step, sequence, "blocks")
        step.block_copies += copies
        if self._owed_blocks is not None:
            self._owed_blocks += self._owed_to(sequence) - owed
        return True

    # --- admission and preemption -------------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence, step: Step) -> bool:
        """Gives a waiting sequence a seat and its cached prefix, if all of its tokens can be computed in what is idle.

        More urgent arrivals may take seat and blocks from running sequences of lower priority.
        """
        lacking_seats = len(self._running) + 1 - self.config.max_num_seqs
        if lacking_seats > 0 and self._victims_for(sequence, lacking_seats, 0) is None:
            return False  # before the look-up, whose cost grows with the prompt and would be paid at every step
        prefix = self.blocks.find_prefix(sequence)
        if (computed := self._in_flight.find(sequence, len(prefix))) is not None:
            self._await(sequence, *computed)
            return False
        wanted = self.blocks.num_blocks_for(sequence.num_tokens) - len(prefix) + self._num_owed_blocks()
        lacking_blocks = wanted - self.blocks.num_idle_after(prefix)
        if self._running and (lacking_seats > 0 or lacking_blocks > 0):
            victims = self._victims_for(sequence, lacking_seats, lacking_blocks)
            if victims is None:
                return False
            if self._assumed is not None:
                self._wants_blocks_back = True
                return False
            for victim in victims:
                self._preempt(victim, step, sequence, "seat" if lacking_seats > 0 else "blocks")
            prefix = self.blocks.find_prefix(sequence)
        self._waiting.remove(sequence)
        self.blocks.attach(sequence, prefix)
        self._note_start(sequence)
        self._admitted.add(sequence)
        sequence.state = SequenceState.RUNNING
        insort(self._running, sequence, key=urgency)
        if self._owed_blocks is not None:
            self._owed_blocks += self._owed_to(sequence)
        if self.config.enable_prefix_caching:
            self._in_flight.add(sequence)
        return True

    def _await(self, sequence: Sequence, writer: Sequence, end_block: int) -> None:
        """Leaves the queue until `writer` has computed its blocks up to `end_block`, as urgently as `sequence` is."""
        self._waiting.remove(sequence)
        self._awaiting[sequence] = (writer, end_block)
        if urgency(sequence) < urgency(writer):
            self._lent.setdefault(writer, (writer.priority, writer.due_s))
            writer.priority, writer.due_s = max(writer.priority, sequence.priority), sequence.due_s
            self._running.sort(key=urgency)

    def _wake(self) -> None:
        """Back into the queue go those whose blocks are there, or will not come; and lent urgency to who lent it."""
        for sequence, (writer, end_block) in list(self._awaiting.items()):
            if writer.state is not SequenceState.RUNNING or writer.num_indexed_blocks >= end_block:
                del self._awaiting[sequence]
                self._waiting.push(sequence)
        awaited = {writer for writer, _ in self._awaiting.values()}
        for writer in self._lent.keys() - awaited:
            writer.priority, writer.due_s = self._lent.pop(writer)
            if writer in self._waiting:
                self._waiting.push(writer)
            self._running.sort(key=urgency)

    def _victims_for(self, sequence: Sequence, num_seats: int, num_blocks: int) -> list[Sequence] | None:
        """The least urgent running sequences whose end would make room; `None` when even all of them would not."""
        victims: list[Sequence] = []
        for victim in reversed(self._running):
            if num_seats <= 0 and num_blocks <= 0:
                break
            if victim.priority >= sequence.priority or urgency(victim) < urgency(sequence):
                return None
            victims.append(victim)
            num_seats -= 1
            num_blocks -= self.blocks.num_exclusive_blocks(victim)
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
        self.counters.preemptions += 1
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
        self.blocks.release(victim)
        self._running.remove(victim)
        self._waiting.push(victim)

    def _note_start(self, sequence: Sequence) -> None:
        if sequence.started_s is None:
            sequence.started_s = self._clock()
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.counters.prefix_queries += sequence.num_prompt_tokens
            self.counters.prefix_hits += sequence.num_cached_tokens

    # --- tokens come back ---------------------------------------------------------------------------------------------

    def commit(self, step: Step, sampled: list[Sampled]) -> list[SequenceOutput]:
        """Takes in what a step computed. `sampled` has each item's `num_draws` tokens, in order."""
        self._assumed = None
        outputs: list[SequenceOutput] = []
        draws = iter(sampled)
        for item in step.scheduled:
            sequence = item.sequence
            if sequence.state is SequenceState.FINISHED:  # since the step was launched
                list(islice(draws, item.num_draws))
                continue
            if item.draft_token_ids:
                outputs.append(self._verify(item, list(islice(draws, item.num_draws))))
                continue
            end = item.start + item.num_scheduled_tokens
            self.counters.recomputed_tokens += max(0, min(end, sequence.num_recompute_tokens) - item.start)
            sequence.num_computed_tokens = end
            self.blocks.index_full_blocks(sequence)
            drawn = [(sampler, next(draws)) for sampler in item.samplers]
            if drawn and end == sequence.num_prompt_tokens:
                self.counters.prompt_tokens += sequence.num_prompt_tokens
                self._fork(sequence, [sampler for sampler, _ in drawn[1:]])
            if drawn:
                self._in_flight.remove(sequence)
            outputs += [self._take_token(sampler, draw) for sampler, draw in drawn]
        self.blocks.step_finished(step.number)
        self.budget.note_step()
        return outputs

    def _verify(self, item: ScheduledSequence, draws: list[Sampled]) -> SequenceOutput:
        """Takes drawn tokens as long as the guess before each was what had been drawn."""
        sequence, draft = item.sequence, item.draft_token_ids
        if draws[0].error_code is not None:
            return self._retry_alone(sequence)
        sequence.num_computed_tokens = item.start + 1
        self.blocks.index_full_blocks(sequence)
        output = self._take_token(sequence, draws[0])
        num_accepted = 0
        while output.finish_reason is None and num_accepted < len(draft):
            if sequence.token_ids[-1] != draft[num_accepted] or draws[num_accepted + 1].error_code is not None:
                break
            # The guess was right: its KV is written, and the next draw was made from the right row.
            num_accepted += 1
            sequence.num_computed_tokens += 1
            self.blocks.index_full_blocks(sequence)
            output.append(self._take_token(sequence, draws[num_accepted]))
        self._lookup.learn(sequence, len(draft), num_accepted)
        self.counters.drafted_tokens += len(draft)
        self.counters.accepted_tokens += num_accepted
        return output

    def _retry_alone(self, sequence: Sequence) -> SequenceOutput:
        """Nothing is taken of a step in which a guess may be what broke the logits; the next one has no guess."""
        self._lookup.stop(sequence)
        return self._output(sequence, [], None)

    def fail(self, sequence: Sequence, code: str, message: str) -> SequenceOutput:
        """Ends one sequence with an error, its unforked siblings after it go on by themselves."""
        output = self._output(sequence, [], "error")
        output.error_code, output.error_message = code, message
        self.abort(sequence.request.request_id, sequence.choice_index)
        return output

    def _fork(self, parent: Sequence, children: list[Sequence]) -> None:
        """Starts the other choices of a request from its computed prompt. Those without a seat are recomputed later."""
        for child in children:
            self._groups[parent.request.request_id].unforked.remove(child)
            child.started_s, child.num_cached_tokens = parent.started_s, parent.num_cached_tokens
            if len(self._running) < self.config.max_num_seqs:
                self.blocks.fork(parent, child)
                child.state = SequenceState.RUNNING
                insort(self._running, child, key=urgency)
            else:
                child.state = SequenceState.PREEMPTED
                child.num_recompute_tokens = parent.num_computed_tokens
                self._waiting.push(child)

    def _take_token(self, sequence: Sequence, draw: Sampled) -> SequenceOutput:
        if draw.error_code is not None:
            self.blocks.distrust(sequence)
            return self.fail(sequence, draw.error_code, "the model's logits are not finite; the request was ended")
        if sequence.token_ids[-1] == PENDING:
            sequence.token_ids.pop()
        sequence.token_ids.append(draw.token_id)
        self.counters.generation_tokens += 1
        output = self._output(sequence, [draw.token_id], self._finish_reason(sequence, draw.token_id))
        if sequence.first_token_s is None and sequence.started_s is not None:
            sequence.first_token_s = self._clock()
            output.queue_s = sequence.started_s - sequence.arrival_s
        if draw.logprobs is not None:
            output.logprobs = [draw.logprobs]
        if output.finish_reason == "stop":
            output.stop_token_id = draw.token_id
        if output.finish_reason is not None:
            self._finish(sequence)
        return output

    @staticmethod
    def _finish_reason(sequence: Sequence, token_id: int) -> FinishReason | None:
        params = sequence.request.params
        if token_id in params.stop_token_ids and sequence.num_output_tokens > params.min_tokens:
            return "stop"
        return "length" if sequence.num_output_tokens >= params.max_tokens else None

    @staticmethod
    def _output(sequence: Sequence, token_ids: list[int], finish_reason: FinishReason | None) -> SequenceOutput:
        return SequenceOutput(
            request_id=sequence.request.request_id,
            choice_index=sequence.choice_index,
            token_ids=token_ids,
            finish_reason=finish_reason,
            num_cached_tokens=sequence.num_cached_tokens or 0,
        )

    def _finish(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._awaiting.pop(sequence, None)
        self._in_flight.remove(sequence)
        self.blocks.release(sequence)
        sequence.state = SequenceState.FINISHED
        group = self._groups[sequence.request.request_id]
        del group.live[sequence.choice_index]
        if not group.live:
            del self._groups[sequence.request.request_id]

    def _refuse_unservable(self, request: Request) -> None:
        config, params = self.config, request.params
        num_prompt, num_total = len(request.prompt_token_ids), len(request.prompt_token_ids) + params.max_tokens
        if request.request_id in self._groups:
            raise EngineError("duplicate_request", f"{request.request_id} is live already; choose another id")
        if num_prompt == 0:
            raise EngineError("empty_prompt", "the prompt holds no token; give at least one")
        if num_total > config.max_model_len:
            raise EngineError(
                "prompt_too_long",
                f"{num_prompt} prompt tokens + max_tokens {params.max_tokens} = {num_total}, context "
                f"{config.max_model_len}; shorten the prompt or lower max_tokens",
            )
        # The last token drawn is never computed, so its KV needs no slot.
        num_blocks = self.blocks.num_blocks_for(num_total - 1)
        if num_blocks > config.num_blocks:
            raise EngineError(
                "exceeds_kv_pool",
                f"{num_prompt} prompt tokens + max_tokens {params.max_tokens} need {num_blocks} blocks of "
                f"{config.block_size}, the pool has {config.num_blocks}; lower max_tokens or give the pool more memory",
            )
