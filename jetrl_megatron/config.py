"""The one home of every default: nested keyword-only dataclasses, and how text overrides reach them.

A recipe is a function that returns a `Config`. `--set a.b=c` goes through `apply_overrides`; `Config.validate`
lists everything that is wrong at once. Nothing here imports torch, so `--help` and validation are instant.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jetrl_kernels.formats import ScalePolicy

Mode = Literal["bf16", "mixed", "jetrl"]


class ConfigError(ValueError):
    """Bad configuration. `problems` holds one line for each violation."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


@dataclass(kw_only=True)
class ModelConfig:
    path: str = "tiny"
    """Hugging Face folder (config.json, safetensors, tokenizer), or `tiny`: made locally and warm-started."""
    max_length: int = 128
    """Longest prompt + response, in tokens."""
    recompute: bool = False
    """Recompute activations in the backward pass instead of keeping them."""


@dataclass(kw_only=True)
class PrecisionConfig:
    mode: Mode = "jetrl"
    """`bf16`: both sides BF16. `mixed`: BF16 training, FP8 rollout. `jetrl`: the same FP8 on both sides."""
    scales: ScalePolicy = "pow2"
    wgrad: Literal["fp8", "bf16"] = "fp8"
    keep_bf16: bool = False
    """Keep a layer whose tiles a layout would cut in BF16 on both sides, instead of refusing the run."""
    linear_backend: Literal["jetrl", "te"] = "jetrl"
    """`jetrl`: our fp8_linear (CPU and GPU). `te`: Transformer Engine layers (GPU only)."""
    parity: Literal["off", "exact"] = "off"
    """`exact`: the trainer's log-prob of every sampled token is the engine's own to the bit. Refused where it cannot be
    promised; a token that differs ends the run before anything is trained on it."""
    fp8_param: bool = False
    """Keep linear weights in FP8 only, beside their FP32 masters: no BF16 copy during forward and backward."""


@dataclass(kw_only=True)
class ParallelConfig:
    """Sizes of the trainer's world; data parallel size is what is left."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    nodes: int = 1
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        """Number of trainer ranks (expert parallel ranks are taken from tp x cp x dp)."""
        return self.tp * self.pp * self.cp * self.dp


@dataclass(kw_only=True)
class RolloutConfig:
    tp: int = 1
    replicas: int = 1
    max_response_tokens: int = 32
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps every token. Anything that cuts the distribution is refused in training: the ratio would be wrong."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    memory_gib: float = 1.0
    """KV cache of one replica, on a CPU or where `gpu_memory_utilization` is 0."""
    gpu_memory_utilization: float = 0.6
    """Share of the GPU that the engine fills with KV cache. 0: `memory_gib`, whatever else uses the GPU meanwhile."""
    enforce_eager: bool = False
    colocated: bool = True
    nodes: int = 0
    """Nodes beside the trainers' that only sample. 0: engines are spread over the trainers' nodes."""
    start_timeout_s: float = 300.0
    call_timeout_s: float = 600.0
    threads: int = 2
    """CPU threads of one engine process."""


@dataclass(kw_only=True)
class RefitConfig:
    """How new weights reach the engines."""

    staging_mib: int = 256
    """Most buffer memory of one rank for weights on their way to or from another node."""
    timeout_s: float = 120.0
    """Longest wait for a peer in a transfer between nodes; the transfer is then tried once more."""
    delta: bool = False
    """Send between nodes only what changed since the last version (docs/refit.md)."""


@dataclass(kw_only=True)
class GRPOConfig:
    prompts_per_step: int = 16
    group_size: int = 8
    clip_low: float = 0.2
    clip_high: float = 0.2
    loss_norm: Literal["token_mean", "sequence_mean"] = "token_mean"
    advantage_std: bool = True
    """Divide group-relative advantages by the group's standard deviation."""
    updates_per_batch: int = 1
    reward_truncated: bool = True
    """Whether an answer cut off by `rollout.max_response_tokens` keeps its score; otherwise it gets 0."""
    importance_cap: float = 0.0
    """Truncate exp(trainer - engine) at this value in the loss weight; 0 leaves it untouched."""


@dataclass(kw_only=True)
class OptimizerConfig:
    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    warmup_steps: int = 0
    master_cast: Literal["nearest", "stochastic"] = "nearest"
    """How FP32 masters are rounded to BF16 weights. `stochastic` is unbiased, so small updates are not lost."""


@dataclass(kw_only=True)
class DataConfig:
    name: str = "reasoning_gym:chain_sum"
    """`reasoning_gym:NAME`, a path to a .jsonl file, or a Hugging Face datasets name."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reasoning-gym generator."""
    split: str = "train"
    eval_split: str = "test"
    question_field: str = "question"
    answer_field: str = "answer"
    eval_size: int = 64
    eval_samples: int = 1
    """Answers per held-out question; pass@1 averages over them."""
    chat_template: bool = False


@dataclass(kw_only=True)
class SFTConfig:
    steps: int = 150
    batch_size: int = 64
    lr: float = 1e-3
    seed: int = 1234
    examples: int = 0
    """Different demonstrations, repeated until `steps` are done, where making one takes long. 0: all are different."""
    wrong_share: float = 0.0
    """Share of the demonstrations that show another question's answer: the policy starts out unsure, and RL has
    something to choose from."""


@dataclass(kw_only=True)
class TrainConfig:
    steps: int = 40
    seed: int = 0
    micro_batch_size: int = 16
    """Sequences per forward pass and data-parallel rank."""
    eval_every: int = 0
    checkpoint_every: int = 10
    """Steps between two checkpoints; the last step is always saved. 0: none at all, except when asked to stop."""
    keep_last: int = 2
    timeout_s: float = 300.0
    """Longest wait of one rank for another, unless that one waits for engines."""
    threads: int = 1
    """CPU threads of one trainer rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    offload: bool = False
    """Move optimizer state and gradients to host memory while a colocated engine samples."""


@dataclass(kw_only=True)
class Config:
    name: str = "unnamed"
    purpose: str = ""
    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    refit: RefitConfig = field(default_factory=RefitConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def nodes(self) -> int:
        """Nodes of the whole job: those that train and those that only sample."""
        return self.parallel.nodes + self.rollout.nodes

    def validate(self) -> None:
        """Check values that need no model and no device.

        Raises:
            ConfigError: with one line for every violation.
        """
        problems = [f"{key}: {problem}" for key, problem in _violations(self)]
        if problems:
            raise ConfigError(problems)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Config:
        """Inverse of `to_dict`. Unknown keys raise ConfigError."""
        return _build(Config, values, "")

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n")


def _violations(c: Config) -> Iterable[tuple[str, str]]:
    positive = (
        "parallel.tp parallel.pp parallel.cp parallel.ep parallel.dp parallel.nodes rollout.tp rollout.replicas "
        "rollout.max_response_tokens rollout.temperature rollout.max_num_seqs rollout.max_num_batched_tokens "
        "rollout.memory_gib rollout.start_timeout_s rollout.call_timeout_s rollout.threads grpo.prompts_per_step "
        "refit.staging_mib refit.timeout_s "
        "grpo.updates_per_batch optimizer.lr optimizer.eps data.eval_size data.eval_samples sft.batch_size sft.lr "
        "train.steps train.micro_batch_size train.keep_last train.timeout_s train.threads "
        "model.max_length"
    )
    for key in positive.split():
        if not get_value(c, key) > 0:
            yield key, f"must be greater than 0, not {get_value(c, key)}"
    for key in [
        "optimizer.weight_decay",
        "optimizer.clip_grad",
        "sft.steps",
        "sft.examples",
        "train.eval_every",
        "train.checkpoint_every",
        "grpo.importance_cap",
        "rollout.nodes",
    ]:
        if get_value(c, key) < 0:
            yield key, f"must not be negative, not {get_value(c, key)}"
    if c.grpo.group_size < 2:
        yield "grpo.group_size", f"a group needs at least 2 answers for a relative advantage, not {c.grpo.group_size}"
    if not 0 <= c.sft.wrong_share < 1:
        yield "sft.wrong_share", f"must be in [0, 1), not {c.sft.wrong_share}"
    for key in ("grpo.clip_low", "grpo.clip_high"):
        if not get_value(c, key) > 0:
            yield key, f"must be greater than 0, not {get_value(c, key)}"
    if c.grpo.clip_low >= 1:
        yield "grpo.clip_low", f"must be below 1, not {c.grpo.clip_low}"
    if c.rollout.top_p != 1.0 or c.rollout.top_k != -1:
        yield (
            "rollout.top_p/top_k",
            "training needs the whole distribution (top_p=1.0, top_k=-1): a cut one makes the importance ratio wrong",
        )
    if c.rollout.max_response_tokens >= c.model.max_length:
        yield (
            "rollout.max_response_tokens",
            f"{c.rollout.max_response_tokens} leaves no room for a prompt in model.max_length={c.model.max_length}",
        )
    sequences, parts = c.grpo.prompts_per_step * c.grpo.group_size, c.parallel.dp * c.grpo.updates_per_batch
    if parts > 0 and sequences % parts:
        yield "parallel.dp", f"{sequences} sequences a step do not divide over dp x updates_per_batch = {parts}"
    if c.parallel.cp > 1:
        yield "parallel.cp", "context parallel training of packed sequences is not supported yet, cp must be 1"
    if c.precision.fp8_param and c.precision.mode != "jetrl":
        yield "precision.fp8_param", f"needs precision.mode=jetrl: in {c.precision.mode} the trainer's weights are BF16"
    if c.parallel.sequence_parallel and c.parallel.tp == 1:
        yield "parallel.sequence_parallel", "needs parallel.tp > 1"
    if not (0 <= c.optimizer.beta1 < 1 and 0 <= c.optimizer.beta2 < 1):
        yield "optimizer.beta1/beta2", "must be in [0, 1)"


def nearest(word: str, choices: Iterable[str], shown: str = "") -> str:
    """`did you mean 'x'?`; where none is near, the choices, or `shown`: what shows so many."""
    choices = list(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else shown or f"choose one of: {', '.join(choices)}"


def get_value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def flat_keys(cls: Any = Config, prefix: str = "") -> list[str]:
    """Every key that `--set` takes, dotted."""
    keys: list[str] = []
    for f in dataclasses.fields(cls):
        kind: Any = typing.get_type_hints(cls)[f.name]
        keys += flat_keys(kind, f"{prefix}{f.name}.") if dataclasses.is_dataclass(kind) else [f"{prefix}{f.name}"]
    return keys


def apply_overrides(config: Config, overrides: Iterable[str]) -> Config:
    """Return a copy with `a.b=c` assignments applied, typed by the field they name.

    Another `data.name` starts with the default splits, fields and options: the recipe's belong to its own data set.

    Raises:
        ConfigError: naming each unknown key (with the nearest known one) and each value of the wrong type.
    """
    values, problems, known = config.to_dict(), [], flat_keys()
    overrides = list(overrides)
    names = [text for key, _, text in (item.partition("=") for item in overrides) if key.strip() == "data.name"]
    if names and names[-1] != config.data.name:
        own = ("options", "split", "eval_split", "question_field", "answer_field")
        values["data"] |= {key: vars(DataConfig())[key] for key in own}
    for item in overrides:
        key, equals, text = item.partition("=")
        key = key.strip()
        option = key.startswith("data.options.")
        if not equals:
            problems.append(f"--set {item}: expected KEY=VALUE")
        elif key not in known and not option:
            same = [repr(k) for k in known if k.split(".")[-1] == key.split(".")[-1]]
            hint = nearest(key, known, "jetrl_megatron/config.py has all")
            problems.append(f"--set {key}: unknown key, " + (f"did you mean {' or '.join(same)}?" if same else hint))
        else:
            target = values
            *parents, leaf = key.split(".")
            for part in parents:
                target = target[part]
            try:
                target[leaf] = _parse(text) if option else _coerce(_parse(text), _type_of(key), text)
            except ValueError as error:
                problems.append(f"--set {key}: {error}")
    changed = Config.from_dict(values)
    if problems:
        try:
            changed.validate()
        except ConfigError as error:
            problems += error.problems
        raise ConfigError(problems)
    return changed


def _type_of(key: str) -> Any:
    kind: Any = Config
    for part in key.split("."):
        kind = typing.get_type_hints(kind)[part]
    return kind


def _parse(text: str) -> Any:
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except json.JSONDecodeError:
        return text


def _coerce(value: Any, kind: Any, shown: str) -> Any:
    origin = typing.get_origin(kind)
    if origin is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise ValueError(f"{shown!r} is not valid, {nearest(str(value), map(str, choices))}")
        return value
    if origin in (dict, types.GenericAlias) or kind is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{shown!r} is not a JSON object")
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{shown!r} is not true or false")
    elif kind is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{shown!r} is not an integer")
    elif kind is float:
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or value != value
            or abs(value) == float("inf")
        ):
            raise ValueError(f"{shown!r} is not a finite number")
        return float(value)
    elif kind is str:
        return shown if not isinstance(value, str) else value
    return value


def _build(cls: Any, values: dict[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    problems = [f"{prefix}{k}: unknown key, {nearest(k, hints)}" for k in values if k not in hints]
    out: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            continue
        try:
            kind: Any = hints[key]
            out[key] = (
                _build(kind, value, f"{prefix}{key}.")
                if dataclasses.is_dataclass(kind)
                else _coerce(value, kind, str(value))
            )
        except ConfigError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(f"{prefix}{key}: {error}")
    if problems:
        raise ConfigError(problems)
    return cls(**out)
