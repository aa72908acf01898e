"""vLLM's scheduler with a short way for the steps of a rollout: every request samples one token, none waits.

With hundreds of sequences and a model of a few billion parameters a step of the GPU is shorter than what vLLM's Python
does for it: its scheduler asks for blocks, builds an output and appends log-probs for every request in every step. Here
a step of decoding touches what changes in it, the block manager is asked only where a block fills up, and a finished
answer leaves as one output. Decisions, blocks and tokens are vLLM's: in all other steps its own code runs, and
`tests/cpu/test_scheduler.py` holds both beside each other.

Written for vLLM 0.26, through its `scheduler_cls`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

LOGPROBS = "jetrl_logprobs"
"""Key in `RequestOutput.kv_transfer_params` of an answer's log-probs: the one field of an output that a scheduler may
fill and vLLM hands on as it is. Its own log-probs are objects built token by token."""


@dataclass(slots=True)
class _Answer:
    """What is kept of a request until it ends."""

    request: Request
    stops: frozenset[int | None]
    logprobs: list[float] = field(default_factory=list)
    prefill_stats: PrefillStats | None = None


class DecodeScheduler(Scheduler):
    """For engines that wait for each step (CPU)."""

    _runs_ahead = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._answers: dict[str, _Answer] = {}
        self._decodes: deque[tuple[SchedulerOutput, list[_Answer]]] = deque()
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._blocks = managers[0]
        parallel, block = self.parallel_config, self._blocks.block_size
        self._simple = (
            [type(m) for m in managers] == [FullAttentionManager]
            and block == self.hash_block_size == self.block_size
            and parallel.pipeline_parallel_size == 1
            and self.num_sampled_tokens_per_step == 1
            and not any((
                self.num_spec_tokens, self.lora_config, self.connector, self.ec_connector, self.is_encoder_decoder,
                self.log_stats, self.enable_kv_cache_events, self.enable_return_routed_experts,
                self.needs_kv_cache_zeroing, self.finished_req_ids_dict is not None,
            ))
        )  # fmt: skip

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if _whole_answer(request):
            params = request.sampling_params
            assert params is not None
            self._answers[request.request_id] = _Answer(
                request, frozenset((params.eos_token_id, *(params.stop_token_ids or ())))
            )

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._answers.pop(request.request_id, None)
        return ended

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        decodes = self._simple and not (
            throttle_prefills
            or self.waiting
            or self.skipped_waiting
            or self._inflight_prefills
            or self._pause_state != PauseState.UNPAUSED
            or len(self._answers) != len(self.requests)
            or len(self.running) > self.max_num_scheduled_tokens
        )
        chosen = self._next_tokens() if decodes else None
        return super().schedule(throttle_prefills) if chosen is None else self._decode(*chosen)

    def _next_tokens(self) -> tuple[list[_Answer], list[bool]] | None:
        """Requests that sample a token next, and which of them fill or need a block; None where it takes vLLM's way."""
        size, owned, hashed = self._blocks.block_size, self._blocks.req_to_blocks, self._blocks.num_cached_block
        chosen, changes, needed = [], [], 0
        for request in self.running:
            name, ahead, computed = request.request_id, request.num_output_placeholders, request.num_computed_tokens
            if ahead and computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens:
                continue  # the step in flight is its last
            if computed + 1 >= self.max_model_len:
                continue
            known = len(request._all_token_ids)
            if known + ahead - computed != 1:
                return None
            full = computed + 1 > len(owned[name]) * size
            needed += full
            chosen.append(self._answers[name])
            changes.append(full or min(computed + 1, known) // size > hashed.get(name, 0))
        if not chosen or needed > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        if not self.use_v2_model_runner and not self.prev_step_scheduled_req_ids.issuperset(
            answer.request.request_id for answer in chosen
        ):
            return None
        return chosen, changes

    def _decode(self, chosen: list[_Answer], changes: list[bool]) -> SchedulerOutput:
        """What `Scheduler.schedule` and `_update_after_schedule` do for requests that sample one token each."""
        self.current_step += 1
        self.prefill_capacity_bound = False
        self.kv_cache_manager.new_step_starts()
        names, blocks, computed, outputs = [], [], [], []
        for answer, change in zip(chosen, changes, strict=True):
            request, new = answer.request, None
            if change:
                added = self.kv_cache_manager.allocate_slots(request, 1)
                assert added is not None
                new = added.get_block_ids(allow_none=True)
            names.append(request.request_id)
            blocks.append(new)
            computed.append(request.num_computed_tokens)
            outputs.append(len(request._output_token_ids) + request.num_output_placeholders)
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            if self._runs_ahead:
                request.num_output_placeholders += 1
                if self.use_v2_model_runner:
                    request.next_decode_eligible_step = self.current_step + 1
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.clear()
            self.prev_step_scheduled_req_ids.update(names)
        copies, retained = self.kv_cache_manager.take_kv_cache_block_copies()
        if copies:
            self._free_cow_retained_blocks(retained, self.sched_step_seq + 1)
        scheduled = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=names,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=blocks,
                num_computed_tokens=computed,
                num_output_tokens=outputs,
            ),
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=self.kv_cache_manager.get_num_common_prefix_blocks(self.running[0].request_id),
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
            kv_cache_block_copies=copies or None,
            num_spec_tokens_to_schedule=self.num_spec_tokens,
        )
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        self._decodes.append((scheduled, chosen))
        return scheduled

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self._decodes and self._decodes[0][0] is scheduler_output:
            return self._sampled(self._decodes.popleft()[1], model_runner_output)
        found = super().update_from_output(scheduler_output, model_runner_output)
        for client in found.values():
            client.outputs = [output for output in client.outputs if self._leaves(output)]
        return found

    def _leaves(self, output: EngineCoreOutput) -> bool:
        """Whether an output leaves the engine now; those of a whole answer are kept until it ends, and leave as one."""
        answer = self._answers.get(output.request_id)
        if answer is None:
            return True
        if (new := output.new_logprobs) is not None:
            _same_tokens(new.logprob_token_ids[:, 0].tolist(), output.new_token_ids)
            answer.logprobs += new.logprobs[:, 0].tolist()
        answer.prefill_stats = output.prefill_stats or answer.prefill_stats
        if output.finished:
            output.new_token_ids, output.new_logprobs = answer.request._output_token_ids, None
            output.prefill_stats = answer.prefill_stats
            output.kv_transfer_params = {LOGPROBS: answer.logprobs}
            del self._answers[output.request_id]
        return output.finished

    def _sampled(self, answers: list[_Answer], result: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """What `Scheduler.update_from_output` does for requests that sampled one token each."""
        tokens, row_of, lists = result.sampled_token_ids, result.req_id_to_index, result.logprobs
        assert lists is not None
        logprobs = lists.logprobs[:, 0].tolist()
        _same_tokens(lists.logprob_token_ids[:, 0].tolist(), [new[0] for new in tokens])
        size, hashed = self._blocks.block_size, self._blocks.num_cached_block
        outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        running, preempted = set(), set()
        for answer in answers:
            request = answer.request
            request.num_in_flight_tokens -= 1
            if request.is_finished():
                continue  # aborted while the step ran
            if request.async_tokens_to_discard:
                request.async_tokens_to_discard -= 1
                continue
            row, status = row_of[request.request_id], request.status
            token = tokens[row][0]
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            length = len(request._all_token_ids)
            if length % size == 0:
                request.update_block_hashes()
            stopped = (
                token in answer.stops
                or length >= self.max_model_len
                or len(request._output_token_ids) >= request.max_tokens
            ) and check_stop(request, self.max_model_len)
            if self._runs_ahead:
                request.num_output_placeholders -= 1
                certain = request.num_computed_tokens - request.num_output_placeholders
                if status == RequestStatus.RUNNING and certain // size > hashed.get(request.request_id, 0):
                    self.kv_cache_manager.cache_blocks(request, certain)
            answer.logprobs.append(logprobs[row])
            if stopped:
                (running if status == RequestStatus.RUNNING else preempted).add(request)
                output = EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=request.stop_reason,
                )
                self._free_request(request)
                self._leaves(output)
                outputs[request.client_index].append(output)
        if running:
            self.running = remove_all(self.running, running)
        if preempted:
            self.waiting.remove_requests(preempted)
        return {client: EngineCoreOutputs(outputs=ended) for client, ended in outputs.items()}


class AsyncDecodeScheduler(DecodeScheduler, AsyncScheduler):
    """For engines that schedule a step while the one before it runs (GPU)."""

    _runs_ahead = True


def _whole_answer(request: Request) -> bool:
    """Whether a request asks for what `rollout.engine.request_parameters` does: its answer when it is whole."""
    params = request.sampling_params
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and params.num_logprobs == 0
        and params.prompt_logprobs is None
        and params.repetition_detection is None
        and request.lora_request is None
        and not any((request.use_structured_output, request.has_encoder_inputs, request.resumable))
    )


def _same_tokens(named: Any, sampled: Any) -> None:
    if named != sampled:
        raise RuntimeError(f"vLLM gave log-probs of tokens {named} where {sampled} were sampled")
