"""The engine inside its process: builds vLLM, loads versions of the weights, samples."""

from __future__ import annotations

import os
import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm import __version__ as vllm_version
from vllm.inputs import TokensPrompt

from jetrl_kernels.digest import digest
from jetrl_megatron.engine_ops.library import ATTENTION_BLOCK
from jetrl_megatron.refit.digests import merge_digests
from jetrl_megatron.refit.message import RefitRefused
from jetrl_megatron.rollout.gpu.options import gpu_options
from jetrl_megatron.rollout.plugin import NAME
from jetrl_megatron.rollout.quantization import quantization_dict
from jetrl_megatron.rollout.scheduler import LOGPROBS, AsyncDecodeScheduler, DecodeScheduler
from jetrl_megatron.rollout.types import (
    Completion,
    EngineError,
    EngineFacts,
    EngineSettings,
    GenerationRefused,
    Sampling,
)

NUMERICS = ("VLLM_", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "CUBLAS", "NVIDIA_TF32", "DG_", "MKL_", "ONEDNN_")
"""Variables (or prefixes of them) that can change an engine's results."""

NOT_NUMERICS = (
    "VLLM_DIST_IDENT",
    "VLLM_OBJECT_STORAGE",
    "VLLM_PLUGINS",
    "VLLM_NO_USAGE_STATS",
    "VLLM_WORKER_MULTIPROC",
)


class Engine:
    """vLLM with our layers and weight transfer. Holds no weights before the first `refit`."""

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        self.llm = LLM(
            model=settings.model_dir,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            quantization=NAME,
            hf_overrides={"quantization_config": quantization_dict(settings.modules, settings.scales)},
            load_format="dummy",
            # A folder's generation_config.json must not change sampling.
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            weight_transfer_config={"backend": NAME},
            worker_extension_cls=settings.worker_extension,
            tensor_parallel_size=settings.tp,
            distributed_executor_backend="uni" if settings.tp == 1 else "mp",
            max_model_len=settings.max_length,
            max_num_seqs=settings.max_num_seqs,
            # vLLM 0.26 on a CPU fails on a seeded request whose prompt is cut ("CPU Generator does not use offset").
            enable_chunked_prefill=not settings.cpu,
            max_num_batched_tokens=max(settings.max_num_batched_tokens, settings.max_num_seqs, settings.max_length),
            block_size=ATTENTION_BLOCK if settings.cpu else None,
            kv_cache_memory_bytes=settings.kv_bytes if settings.cpu or not settings.gpu_memory_utilization else None,
            gpu_memory_utilization=settings.gpu_memory_utilization or 0.01,
            enforce_eager=settings.cpu or settings.enforce_eager,
            **({"compilation_config": {"custom_ops": ["all"]}} if settings.cpu else gpu_options(settings)),
            enable_prefix_caching=True,
            scheduler_cls=DecodeScheduler if settings.cpu else AsyncDecodeScheduler,
            disable_log_stats=True,
            seed=0,
        )
        self.llm.init_weight_transfer_engine({"init_info": {"scales": settings.scales}})
        self.version: int | None = None
        self._held: int | None = None
        self._updating = False
        self._asleep = False

    def facts(self) -> EngineFacts:
        worker = self.call_workers("jetrl_facts")[0]
        rope = worker.get("rope")
        return EngineFacts(
            vllm=vllm_version,
            attention_isa=worker.get("attention_isa"),
            attention_block=self.llm.llm_engine.vllm_config.cache_config.block_size,
            rope_digest=None if rope is None else digest(rope),
            # Empty unless a generation_config.json got through.
            sampling_defaults=self.llm.model_config.get_diff_sampling_param(),
            numerics={
                k: v for k, v in sorted(os.environ.items()) if k.startswith(NUMERICS) and not k.startswith(NOT_NUMERICS)
            },
        )

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Result of a method of the worker extension, from every worker."""
        return self.llm.collective_rpc(method, args=arguments)

    def expose(self, message: dict[str, Any]) -> list[str]:
        """Let others write a version into the live parameters; from now until `accept` there is none to sample from.

        Args:
            message: what `refit` will be asked to load, with `PLACED` segments.

        Returns:
            For each worker the table of its parameters, which stay where they are as long as the engine lives.

        Raises:
            RefitRefused: nothing was changed.
        """
        self._refuse(message)
        if self.settings.sleep:
            raise RefitRefused(["this engine may sleep: its parameters cannot be mapped by others"])
        self.version = self._held = None
        return self.call_workers("jetrl_expose")

    def _refuse(self, message: dict[str, Any]) -> None:
        """Raise RefitRefused with what any worker finds wrong with a message."""
        problems = [p for worker in self.call_workers("jetrl_check", message) for p in worker]
        if problems:
            raise RefitRefused(dict.fromkeys(problems))

    def refit(self, message: dict[str, Any], hold: bool = False) -> dict[str, int]:
        """Load one chunk of a version; after the last one, drop cached keys and values and digest the live parameters.

        Args:
            message: `RefitMessage.to_dict()`.
            hold: the version serves only after `accept`. From the first byte that changes until then there is no
                version, and `generate` and `score` refuse.

        Returns:
            Digests by Hugging Face name after the last chunk, an empty dict before.

        Raises:
            RefitRefused: nothing was changed.
        """
        self._refuse(message)
        self.version = self._held = None
        if self._asleep and message["chunk"] == 0:
            self._wake("weights")
        if message["chunk"] == 0:
            if self._updating:  # a version whose last chunks never came
                self.llm.finish_weight_update()
            self.llm.start_weight_update()
            self._updating = True
        self.llm.update_weights({"update_info": {"message": message}})
        if message["chunk"] + 1 < message["chunks"]:
            return {}
        self.llm.finish_weight_update()
        self._updating = False
        held = set(self.call_workers("jetrl_version"))
        if held != {message["version"]}:
            raise RuntimeError(f"workers hold versions {held} after loading {message['version']}")
        if self._asleep:
            # Only now: until the weights are in, the trainer may need the room.
            self._wake("kv_cache")
            self._asleep = False
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset: requests are still running")
        digests = merge_digests(self.call_workers("jetrl_digests"))
        self._held = message["version"]
        if not hold:
            self.accept()
        return digests

    def accept(self) -> None:
        """The digests of the version loaded last are the trainer's: serve it."""
        if self._held is None:
            raise RuntimeError("accept came before a whole version")
        self.version, self._held = self._held, None

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of every token but the first of given sequences, by prefill (temperature 1).

        Raises:
            GenerationRefused: no weights yet, or sequences that do not fit.
        """
        problems = [] if self.version is not None else ["the engine holds no complete version of the weights"]
        problems += [
            f"sequence {i}: {len(s)} tokens, between 2 and {self.settings.max_length - 1} fit"
            for i, s in enumerate(sequences)
            if not 2 <= len(s) < self.settings.max_length
        ]
        if problems:
            raise GenerationRefused(problems)
        asked = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        outputs = self.llm.generate([TokensPrompt(prompt_token_ids=s) for s in sequences], asked, use_tqdm=False)
        return [_of_tokens(output.prompt_logprobs, s[1:]) for s, output in zip(sequences, outputs)]

    def sleep(self) -> None:
        """Give weights and KV cache back to the GPU; addresses stay reserved, so captured graphs stay valid."""
        if self.settings.sleep and not self._asleep:
            self.llm.sleep(level=2)
            self.version, self._asleep = None, True

    def _wake(self, tag: str) -> None:
        try:
            self.llm.wake_up(tags=[tag])
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            hint = "train.offload=true, model.recompute=true or a smaller KV cache (rollout.memory_gib) leave more"
            raise EngineError(f"the GPU has no room for the sleeping engine's {tag}: {hint}") from error

    def generate(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Completion]:
        """One answer to each prompt, in order. The answer depends on prompt, seed, sampling and weights alone.

        Raises:
            GenerationRefused: no weights yet, sampling that training cannot use, or prompts that do not fit.
        """
        problems = sampling.problems()
        if self.version is None:
            problems.append("the engine holds no complete version of the weights; refit first")
        if len(prompts) != len(seeds):
            problems.append(f"{len(prompts)} prompts, but {len(seeds)} seeds")
        for i, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= self.settings.max_length - sampling.max_tokens:
                problems.append(
                    f"prompt {i}: {len(prompt)} tokens and {sampling.max_tokens} new ones do not fit max_length "
                    f"{self.settings.max_length}"
                )
        if problems:
            raise GenerationRefused(problems)
        assert self.version is not None
        requests = [request_parameters(sampling, seed) for seed in seeds]
        if requests:
            print(
                f"[jetrl] version {self.version}: {len(requests)} requests, {requests[0]}", file=sys.stderr, flush=True
            )
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], requests, use_tqdm=False
        )
        return [_completion(prompt, output, self.version) for prompt, output in zip(prompts, outputs)]


def request_parameters(sampling: Sampling, seed: int) -> SamplingParams:
    """How vLLM samples one answer, in training, evaluation and benchmarks alike."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        min_tokens=0,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        # Else vLLM adds the end ids of config.json and generation_config.json to ours.
        ignore_eos=True,
        seed=seed,
        logprobs=0,
        # Lists of numbers, not a dict and a Logprob for every token.
        flat_logprobs=True,
        detokenize=False,
    )


def _completion(prompt: list[int], output: Any, version: int) -> Completion:
    answer = output.outputs[0]
    ids = list(answer.token_ids)
    if answer.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"a request ended by {answer.finish_reason!r}")
    return Completion(
        prompt_ids=prompt,
        token_ids=ids,
        logprobs=answer_logprobs(output),
        finish_reason=answer.finish_reason,
        version=version,
        cached_tokens=output.num_cached_tokens or 0,
    )


def answer_logprobs(output: Any) -> list[float]:
    """Log-probs of an answer's tokens, from the RequestOutput of a request with `request_parameters`."""
    found, ids = output.kv_transfer_params[LOGPROBS], output.outputs[0].token_ids
    if len(found) != len(ids):
        raise RuntimeError(f"{len(found)} log-probs of {len(ids)} tokens")
    return found


def _of_tokens(flat: Any, ids: list[int]) -> list[float]:
    """Log-probs of `ids` from vLLM's FlatLogprobs, which must hold these tokens and nothing else."""
    if flat.token_ids != ids:
        raise RuntimeError(f"log-probs of {len(flat.token_ids)} tokens that are not the {len(ids)} of the sequence")
    return flat.logprobs
