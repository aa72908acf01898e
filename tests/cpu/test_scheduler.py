"""Our scheduler beside vLLM's own, in lockstep: equal decisions, blocks, hashes, tokens and log-probs in every step."""

from __future__ import annotations

import random
import zlib
from collections import deque
from typing import Any

import numpy as np
import pytest

BLOCK = 16
STOP = 7

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    from rollout_support import write_model
    from vllm.engine.arg_utils import EngineArgs

    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=160, max_num_seqs=8,
        max_num_batched_tokens=160, enable_prefix_caching=True, load_format="dummy",
    )  # fmt: skip
    return arguments.create_engine_config()


def _hash(value: Any) -> bytes:
    return repr(value).encode()


class Run:
    """One scheduler, and a runner that samples what (request, position) say; `ahead` steps are in flight."""

    def __init__(self, kind: type, config: Any, blocks: int, v2: bool):
        import torch
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(_hash)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
        config.cache_config.num_gpu_blocks, config.cache_config.block_size = blocks, BLOCK
        kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)])
        self.hasher = get_request_block_hasher(BLOCK, _hash)
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=False,
        )
        self.scheduler.use_v2_model_runner = v2
        self.in_flight: deque = deque()
        self.sampled: dict[str, int] = {}
        self.ended: dict[str, tuple] = {}
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.cached: dict[str, Any] = {}

    def add(self, name: str, prompt: list[int], params: Any) -> None:
        from vllm.v1.request import Request

        self.scheduler.add_request(
            Request(name, list(prompt), params.clone(), pooling_params=None, block_hasher=self.hasher)
        )

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def schedule(self, generator: random.Random) -> Any:
        scheduled = self.scheduler.schedule()
        if scheduled.total_num_scheduled_tokens:
            self.in_flight.append((scheduled, self._result(scheduled, generator)))
        return scheduled

    def _result(self, scheduled: Any, generator: random.Random) -> Any:
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        names = list(scheduled.num_scheduled_tokens)
        generator.shuffle(names)  # a runner has its own order
        tokens = []
        for name in names:
            request = self.scheduler.requests[name]
            goal = request.num_tokens + request.num_output_placeholders
            if self.scheduler._runs_ahead_:  # the placeholder of this very step is counted already
                goal -= not request.is_prefill_chunk
            samples = request.num_computed_tokens >= goal
            position = request.num_computed_tokens
            tokens.append([zlib.crc32(f"{name} {position}".encode()) % 29] if samples else [])
        column = np.array([[t[0] if t else -1] for t in tokens])
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=LogprobsLists(column, -column / 8.0, np.zeros(len(names), dtype=int)),
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def update(self) -> None:
        from jetrl_megatron.rollout.scheduler import LOGPROBS

        for client in self.scheduler.update_from_output(*self.in_flight.popleft()).values():
            for output in client.outputs:
                name = output.request_id
                self.tokens.setdefault(name, []).extend(output.new_token_ids)
                if output.kv_transfer_params:
                    self.logprobs[name] = output.kv_transfer_params[LOGPROBS]
                elif output.new_logprobs is not None:
                    self.logprobs.setdefault(name, []).extend(output.new_logprobs.logprobs[:, 0].tolist())
                if output.prefill_stats is not None:
                    self.cached[name] = output.prefill_stats
                if output.finished:
                    self.ended[name] = (
                        output.finish_reason, output.stop_reason, self.tokens[name], self.logprobs.get(name),
                        self.cached[name],
                    )  # fmt: skip

    def state(self) -> tuple:
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        requests = {
            name: (
                r.status, r.num_computed_tokens, r.num_output_placeholders, r.num_in_flight_tokens, r.block_hashes,
                list(r.all_token_ids), r.next_decode_eligible_step, r.is_prefill_chunk,
                scheduler.kv_cache_manager.get_block_ids(name),
            )
            for name, r in scheduler.requests.items()
        }  # fmt: skip
        blocks = [(b.ref_cnt, b.block_hash) for b in pool.blocks]
        free = [b.block_id for b in pool.free_block_queue.get_all_free_blocks()]
        return (
            requests, blocks, free, [r.request_id for r in scheduler.running], len(scheduler.waiting),
            scheduler.finished_req_ids, scheduler.current_step,
        )  # fmt: skip


def params(generator: random.Random, whole: bool) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=generator.choice([1, 2, 17, 40, 90]),
        stop_token_ids=[STOP] if generator.random() < 0.5 else [],
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.CUMULATIVE,
    )


@pytest.mark.parametrize("v2", [True, False], ids=["runner-v2", "runner-v1"])
@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "ahead"])
def test_every_step_is_that_of_vllm(vllm_config, ahead, v2):
    short = 0
    for _ in range(60):
        seed = random.randrange(2**32)
        try:
            short += lockstep(vllm_config, ahead, v2, seed)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
    assert short > 600, "the short way was hardly ever taken"


def lockstep(vllm_config: Any, ahead: bool, v2: bool, seed: int) -> int:
    """Random requests, stops, aborts and preemptions through vLLM's scheduler and ours; how many steps were short."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from jetrl_megatron.rollout.scheduler import AsyncDecodeScheduler, DecodeScheduler

    generator = random.Random(seed)
    blocks = generator.choice([14, 30, 200])  # the first two preempt
    kinds = (AsyncScheduler, AsyncDecodeScheduler) if ahead else (Scheduler, DecodeScheduler)
    for kind in kinds:
        kind._runs_ahead_ = ahead
    theirs, ours = (Run(kind, vllm_config, blocks, v2) for kind in kinds)
    wanted = generator.randint(1, 14)
    others = generator.random() < 0.3  # requests that take vLLM's way, in between
    prompts = [[generator.randrange(50) for _ in range(generator.randint(1, 60))] for _ in range(3)]
    added = short = 0
    for _ in range(2000):
        while added < wanted and generator.random() < 0.6:
            prompt, asked = generator.choice(prompts), params(generator, not (others and generator.random() < 0.3))
            for run in (theirs, ours):
                run.add(str(added), prompt, asked)
            added += 1
        if generator.random() < 0.02 and theirs.scheduler.requests:
            name = generator.choice(sorted(theirs.scheduler.requests))
            for run in (theirs, ours):
                run.abort(name)
        order = generator.random()
        assert theirs.schedule(random.Random(order)) == ours.schedule(random.Random(order))
        last = ours.in_flight and ours.in_flight[-1][0]
        short += any(scheduled is last for scheduled, _ in ours.scheduler._decodes)
        assert theirs.state() == ours.state()
        while theirs.in_flight and (
            len(theirs.in_flight) == 1 + ahead or not theirs.scheduler.requests or generator.random() < 0.2
        ):
            theirs.update()
            ours.update()
            assert theirs.state() == ours.state()
            assert theirs.ended == ours.ended
        if added == wanted and not theirs.scheduler.requests and not theirs.in_flight:
            break
    assert not ours.scheduler.requests
    assert not ours.scheduler._answers
    assert not ours.scheduler._decodes
    return short
