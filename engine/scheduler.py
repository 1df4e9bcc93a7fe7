"""What runs in each step: decodes, guesses, prefill chunks within a token budget.

Owns every `Sequence` and the only `BlockManager`. Doesn't know models, tensors or sockets: a step goes out
(`schedule`), drawn tokens come back (`commit`). Who has a seat, and whose blocks are taken, is decided in `seats.py`.

A step is formed anew each time. Running sequences that decode come first; what is left of the token budget goes to
prefill chunks, running and newly admitted, in order of urgency.

A device that works by itself need not wait for this: while a step is on its way, `assume` goes on as if it had come
back, with `PENDING` for what it draws, and the next one is formed. Nobody is preempted in that one, and blocks that are
released stay out of the pool until the steps that name them have finished (`BlockManager.hold_releases`).
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from pagedd.engine.config import SchedulerConfig
from pagedd.engine.counters import SchedulerCounters
from pagedd.engine.errors import EngineError
from pagedd.engine.kv.block_manager import BlockManager
from pagedd.engine.policy import due_s, urgency
from pagedd.engine.request import FinishReason, Preemption, Request, SequenceOutput
from pagedd.engine.seats import Seats
from pagedd.engine.sequence import PENDING, Sequence, SequenceState
from pagedd.engine.servable import refuse_unservable
from pagedd.engine.speculation import PromptLookup
from pagedd.engine.step import Sampled, ScheduledSequence, Step
from pagedd.engine.token_budget import TokenBudget


@dataclass(slots=True, eq=False)
class _Group:
    """The live choices of one request. `unforked` ones wait for the first to complete the prompt they share."""

    live: dict[int, Sequence]
    unforked: list[Sequence] = field(default_factory=list)


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
        self._clock = clock
        self._groups: dict[str, _Group] = {}
        self._seats = Seats(config, blocks, self.counters, clock)
        self._orders = itertools.count()
        self._lookup = PromptLookup(config.num_speculative_tokens)
        self.budget = TokenBudget(config.max_num_batched_tokens, config.max_num_seqs)
        self._assumed: Step | None = None

    # --- requests come and go -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            EngineError: `duplicate_request`, `empty_prompt`, `prompt_too_long`, or `exceeds_kv_pool` for one that could
                not fit the pool even alone.
        """
        if request.request_id in self._groups:
            raise EngineError("duplicate_request", f"{request.request_id} is live already; choose another id")
        refuse_unservable(request, self.config)
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
        self._seats.enqueue(choices[0])

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
            self._seats.enqueue(group.unforked.pop(0))
        return bool(doomed)

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Changes how urgent a live request is. False when no request of that id is live."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        if self.config.scheduling_policy == "priority":
            for sequence in group.live.values():
                due = due_s(sequence.arrival_s, priority, self.config.ageing_s_per_point)
                self._seats.set_urgency(sequence, priority, due)
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The sequences that have a seat, most urgent first."""
        return tuple(self._seats.running)

    @property
    def num_running(self) -> int:
        return len(self._seats.running)

    @property
    def num_waiting(self) -> int:
        return self._seats.num_waiting

    @property
    def num_awaiting_prefix(self) -> int:
        return self._seats.num_awaiting_prefix

    @property
    def oldest_wait_s(self) -> float:
        """Seconds that the longest-waiting, never started sequence has waited; 0 when none waits."""
        choices = ((choice, group) for group in self._groups.values() for choice in group.live.values())
        waiting = (c for c, group in choices if c.state is SequenceState.WAITING and c not in group.unforked)
        oldest = next(waiting, None)  # groups stand in order of arrival
        return 0.0 if oldest is None else self._clock() - oldest.arrival_s

    @property
    def preemptions(self) -> list[Preemption]:
        """Of the last step."""
        return self._seats.preemptions

    def live_sequences(self) -> Iterator[Sequence]:
        """Every sequence that has not finished, in order of arrival of their requests."""
        for group in self._groups.values():
            yield from group.live.values()

    def check_integrity(self) -> None:
        """Raises `IntegrityError` when blocks, index and block tables contradict each other."""
        self.blocks.check_integrity(self.live_sequences())

    # --- a step goes out ----------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Forms the next batch. Empty only when all that is live waits: for a step not yet back, or for the disk."""
        step = Step(number=self.counters.steps)
        self._seats.begin_step(is_ahead=self._assumed is not None)
        decoding, prefilling = self._seats.decoding_and_prefilling()
        budget = self._schedule_decodes(step, decoding, prefilling)
        self._schedule_prefills(step, budget, prefilling)
        self.num_scheduled_tokens = step.num_scheduled_tokens
        self.counters.steps += bool(step.scheduled)
        if step.scheduled and self.blocks.tiers is not None:
            step.block_saves, step.block_loads = self.blocks.tiers.take_copies()
            step.has_transfers = bool(step.block_saves or step.block_loads)
        return step

    def can_run_ahead(self, step: Step) -> bool:
        """Whether the next step may be formed while `step`, the only one on its way, is not back.

        Not when somebody wants blocks or a seat that others hold. Nor when what comes next depends on the tokens
        themselves: on guesses, or choices that begin with a finished prompt.
        """
        return not self._seats.wants_blocks_back and all(
            not item.draft_token_ids and len(item.samplers) <= 1 for item in step.scheduled
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

    def _schedule_decodes(self, step: Step, decoding: list[Sequence], prefilling: deque[Sequence]) -> int:
        """A token each; returns what is left of the budget."""
        budget = self.budget.tokens
        candidates = (self._seats.most_urgent_waiting(), prefilling[0] if prefilling else None)
        prompts = [sequence for sequence in candidates if sequence is not None]
        # A prompt that is more urgent than somebody who decodes must not wait until decodes leave it a token.
        presses = bool(decoding and prompts) and urgency(min(prompts, key=urgency)) < urgency(decoding[-1])
        num_kept = int(presses and budget > 1)
        for sequence in self.budget.in_turn(decoding):
            if budget > num_kept and self._decode(step, sequence):
                budget -= 1
        # Only the most urgent can always have a block, and it need not be among those whose turn it is.
        if decoding and not step.scheduled and self._decode(step, decoding[0]):
            budget -= 1
        budget = min(budget, self.budget.for_chunks)
        return budget - (self._add_guesses(step, budget) if self._assumed is None and not self.budget.is_paced else 0)

    def _decode(self, step: Step, sequence: Sequence) -> bool:
        """Its next token goes into the step, unless it lost its seat or finds no block."""
        if sequence.state is not SequenceState.RUNNING or not self._seats.grow(sequence, 1, step):
            return False
        self._enter(step, sequence, 1)
        return True

    def _add_guesses(self, step: Step, budget: int) -> int:
        """Lets the step's sequences, each with its token, compute guesses as well; returns how many in all.

        Prompts keep half of the budget, and nobody loses a block: guesses only take what running sequences don't need.
        """
        if self.config.num_speculative_tokens == 0:
            return 0
        num_left, decodes = budget // 2, list(step.scheduled)
        num_spare_blocks = self.blocks.pool.num_idle - self._seats.num_owed_blocks()
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
            self._seats.guesses_took_blocks()
            item.num_scheduled_tokens += len(draft)
            item.draft_token_ids = draft
            num_left -= len(draft)
            num_guesses += len(draft)
        return num_guesses

    def _schedule_prefills(self, step: Step, budget: int, running: deque[Sequence]) -> None:
        """`running`: sequences that prefill already; they and admitted ones share `budget`."""
        halved: ScheduledSequence | None = None
        num_preemptions = len(self._seats.preemptions)
        while budget > 0 and (sequence := self._seats.next_prefill(running, step)) is not None:
            chunk = min(sequence.num_uncomputed_tokens, budget)
            # A long prompt shares the budget with a shorter one behind it, whose first token is a few chunks away.
            shares = halved is None and chunk == budget > 1 and self._seats.is_shorter_next(running, sequence)
            if shares:
                chunk -= chunk // 2
            if self._seats.grow(sequence, chunk, step):
                self._enter(step, sequence, chunk)
                halved = step.scheduled[-1] if shares else halved
                budget -= chunk
            if len(self._seats.preemptions) > num_preemptions:  # somebody left the step
                num_preemptions = len(self._seats.preemptions)
                budget = self.budget.left(step)
        if halved is not None and halved in step.scheduled and budget > 0:
            self._extend(step, halved, budget)

    def _extend(self, step: Step, item: ScheduledSequence, budget: int) -> None:
        """Gives a chunk that was halved what nobody else took."""
        chunk = min(item.sequence.num_uncomputed_tokens, item.num_scheduled_tokens + budget)
        if self._seats.grow(item.sequence, chunk, step):
            step.scheduled.remove(item)
            self._enter(step, item.sequence, chunk)

    def _enter(self, step: Step, sequence: Sequence, num_tokens: int) -> None:
        samplers: list[Sequence] = []
        start = sequence.num_computed_tokens
        if start + num_tokens >= len(sequence.token_ids):
            samplers.append(sequence)
            if sequence.num_output_tokens == 0:
                samplers += self._groups[sequence.request.request_id].unforked
        step.scheduled.append(ScheduledSequence(sequence, start, num_tokens, samplers))

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
                outputs.append(self._take_verified(item, list(islice(draws, item.num_draws))))
                self.blocks.close_full_blocks(sequence, item.start)
                continue
            end = item.start + item.num_scheduled_tokens
            if item.start < sequence.num_recompute_tokens:
                self.counters.recomputed_tokens += min(end, sequence.num_recompute_tokens) - item.start
            sequence.num_computed_tokens = end
            self.blocks.index_full_blocks(sequence)
            self.blocks.close_full_blocks(sequence, item.start)
            drawn = [(sampler, next(draws)) for sampler in item.samplers]
            if len(drawn) > 1:  # choices may have been aborted since the step was launched
                drawn = [(sampler, draw) for sampler, draw in drawn if sampler.state is not SequenceState.FINISHED]
            if not drawn:
                continue
            if end == sequence.num_prompt_tokens:
                self.counters.prompt_tokens += sequence.num_prompt_tokens
                self._fork(sequence, [sampler for sampler, _ in drawn if sampler is not sequence])
            self._seats.has_computed_prompt(sequence)
            for sampler, draw in drawn:
                outputs.append(self._take_token(sampler, draw))
        self.blocks.step_finished(step.number)
        return outputs

    def _take_verified(self, item: ScheduledSequence, draws: list[Sampled]) -> SequenceOutput:
        """Takes what was drawn behind the token of `item` and behind its guesses, as far as those were right."""
        sequence, num_drafted = item.sequence, len(item.draft_token_ids)
        verified = self._lookup.verify(sequence, item.draft_token_ids, draws)
        output, num_taken = self._output(sequence, [], None), 0
        while num_taken < len(verified) and output.finish_reason is None:
            sequence.num_computed_tokens += 1
            self.blocks.index_full_blocks(sequence)
            output.append(self._take_token(sequence, verified[num_taken]))
            num_taken += 1
        if verified:
            self._lookup.learn(sequence, num_drafted, num_taken - 1)
            self.counters.drafted_tokens += num_drafted
            self.counters.accepted_tokens += num_taken - 1
        return output

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
            if self.num_running < self.config.max_num_seqs:
                self.blocks.fork(parent, child)
                self._seats.seat(child)
            else:
                child.state = SequenceState.PREEMPTED
                child.num_recompute_tokens = parent.num_computed_tokens
                self._seats.enqueue(child)

    def _take_token(self, sequence: Sequence, draw: Sampled) -> SequenceOutput:
        if draw.error_code is not None:
            self.blocks.distrust(sequence)
            return self.fail(sequence, draw.error_code, "the model's logits are not finite; the request was ended")
        token_ids = sequence.token_ids
        if token_ids[-1] == PENDING:
            token_ids.pop()
        token_ids.append(draw.token_id)
        self.counters.generation_tokens += 1
        output = self._output(sequence, [draw.token_id], sequence.reason_to_finish)
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
    def _output(sequence: Sequence, token_ids: list[int], finish_reason: FinishReason | None) -> SequenceOutput:
        return SequenceOutput(
            request_id=sequence.request.request_id,
            choice_index=sequence.choice_index,
            token_ids=token_ids,
            finish_reason=finish_reason,
            num_cached_tokens=sequence.num_cached_tokens or 0,
        )

    def _finish(self, sequence: Sequence) -> None:
        self._seats.leave(sequence)
        self.blocks.release(sequence)
        sequence.state = SequenceState.FINISHED
        group = self._groups[sequence.request.request_id]
        del group.live[sequence.choice_index]
        if not group.live:
            del self._groups[sequence.request.request_id]
