"""A tiny Qwen3 and its tokenizer, made here: no account, no download.

Every size is a multiple of 128, so that FP8 tiles stay whole at TP=1 and TP=2. The tokenizer knows printable ASCII
character by character, digits always singly, and gives the rest of its vocabulary to whole words of the task's own
questions: that keeps prompts at a fifth of their length in characters.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SPECIAL = {"pad": "<|pad|>", "bos": "<|begin|>", "eos": "<|end|>", "unk": "<|unk|>"}
CHARACTERS = [chr(c) for c in range(32, 127)] + ["\n", "\t"]
PIECE = r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]|\s"
"""What may become one token: a word or a sign with its leading blank, a single digit, one white-space character."""

COMMON = 8

BASE_VOCABULARY = len(SPECIAL) + len(CHARACTERS)


@dataclass(frozen=True, kw_only=True)
class TinySizes:
    hidden: int = 256
    layers: int = 2
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 128
    ffn: int = 512
    vocabulary: int = 256
    """256: Megatron pads to 128 x TP, so TP=2 needs no padded rows."""
    max_positions: int = 4096
    tied: bool = True

    def check(self) -> None:
        """Raises:
        ValueError: naming every size that is not a positive multiple of 128 (or that does not fit the others).
        """
        problems = [
            f"{name}={value} is not a positive multiple of 128"
            for name in ("hidden", "head_dim", "ffn", "vocabulary")
            if (value := getattr(self, name)) <= 0 or value % 128
        ]
        problems += [
            f"{name}={getattr(self, name)} is not positive"
            for name in ("layers", "heads", "kv_heads")
            if getattr(self, name) <= 0
        ]
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            problems.append(f"heads={self.heads} do not divide into kv_heads={self.kv_heads} groups")
        if problems:
            raise ValueError("tiny model: " + "; ".join(problems))


def common_pieces(questions: Iterable[str], room: int) -> list[str]:
    """Pieces of several characters that occur in at least 1 of `COMMON` questions: the task's fixed wording.

    What varies between questions (the word to spell, say) stays in characters, or the model could not look inside.

    Returns:
        At most `room` pieces, those that save most characters first (ties alphabetically).
    """
    import regex

    questions = list(questions)
    found = [set(regex.findall(PIECE, question)) for question in questions]
    counts = Counter(piece for pieces in found for piece in pieces if len(piece) > 1)
    common = {piece: count * (len(piece) - 1) for piece, count in counts.items() if count * COMMON >= len(questions)}
    return sorted(common, key=lambda piece: (-common[piece], piece))[: max(room, 0)]


def make_tiny_tokenizer(folder: Path, *, vocabulary: int = 256, questions: Iterable[str] = ()) -> None:
    """Write tokenizer.json and tokenizer_config.json, loadable by AutoTokenizer and vLLM without a network.

    Args:
        vocabulary: number of ids; what characters and words leave over are named fillers, so that every id that the
            engine may sample has a text.
        questions: sample of the task; its commonest words become single tokens. Depends on nothing else.

    Raises:
        ValueError: the vocabulary has no room for the characters.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    if vocabulary < BASE_VOCABULARY:
        raise ValueError(f"vocabulary={vocabulary} has no room for {BASE_VOCABULARY} characters and special tokens")
    names = [*SPECIAL.values(), *CHARACTERS, *common_pieces(questions, vocabulary - BASE_VOCABULARY)]
    names += [f"<|filler{i}|>" for i in range(vocabulary - len(names))]
    # BPE without merges whose whole-word hits are taken as they are: anything else falls apart into characters.
    tokenizer = Tokenizer(
        models.BPE({n: i for i, n in enumerate(names)}, [], unk_token=SPECIAL["unk"], ignore_merges=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIAL.values()])
    bos = (SPECIAL["bos"], names.index(SPECIAL["bos"]))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{f"{kind}_token": text for kind, text in SPECIAL.items()},
    )
    fast.save_pretrained(folder)


def tiny_config(sizes: TinySizes) -> dict[str, object]:
    """config.json of a Qwen3ForCausalLM with these sizes, in the format that Qwen's own folders have."""
    special = list(SPECIAL)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.ffn,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.max_positions,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": sizes.tied,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": sizes.layers,
        "torch_dtype": "bfloat16",
        "pad_token_id": special.index("pad"),
        "bos_token_id": special.index("bos"),
        "eos_token_id": special.index("eos"),
    }


def tiny_shapes(sizes: TinySizes) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of every tensor."""
    s = sizes
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s.vocabulary, s.hidden)}
    for i in range(s.layers):
        p = f"model.layers.{i}."
        shapes |= {
            p + "input_layernorm.weight": (s.hidden,),
            p + "self_attn.q_proj.weight": (s.heads * s.head_dim, s.hidden),
            p + "self_attn.k_proj.weight": (s.kv_heads * s.head_dim, s.hidden),
            p + "self_attn.v_proj.weight": (s.kv_heads * s.head_dim, s.hidden),
            p + "self_attn.q_norm.weight": (s.head_dim,),
            p + "self_attn.k_norm.weight": (s.head_dim,),
            p + "self_attn.o_proj.weight": (s.hidden, s.heads * s.head_dim),
            p + "post_attention_layernorm.weight": (s.hidden,),
            p + "mlp.gate_proj.weight": (s.ffn, s.hidden),
            p + "mlp.up_proj.weight": (s.ffn, s.hidden),
            p + "mlp.down_proj.weight": (s.hidden, s.ffn),
        }
    shapes["model.norm.weight"] = (s.hidden,)
    if not s.tied:
        shapes["lm_head.weight"] = (s.vocabulary, s.hidden)
    return shapes


def make_tiny_model(folder: str | Path, seed: int, *, questions: Iterable[str] = (), **sizes: int | bool) -> Path:
    """Write a randomly initialized tiny Qwen3 folder: config.json, model.safetensors (BF16), tokenizer.

    Args:
        folder: made if missing; files of the same names are replaced.
        seed: of the weights; the same seed and sizes give the same bytes.
        questions: sample of the task for the tokenizer's words.
        sizes: fields of `TinySizes`.

    Returns:
        The folder.

    Raises:
        ValueError: sizes that break FP8 tiles or do not fit each other.
    """
    import torch
    from safetensors.torch import save_file

    shape = TinySizes(**sizes)  # pyright: ignore[reportArgumentType]
    shape.check()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, dims in tiny_shapes(shape).items():
        if len(dims) == 1:
            tensors[name] = torch.ones(dims, dtype=torch.bfloat16)
            continue
        # Linear layers: variance-preserving, which so narrow a model needs to learn in a hundred steps; what writes
        # into the residual stream is divided by sqrt(2 x layers) (GPT-2). Embedding: 0.02, since it may be the head.
        std = 0.02 if "embed" in name else dims[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= (2 * shape.layers) ** 0.5
        tensors[name] = (torch.randn(dims, generator=generator) * std).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(tiny_config(shape), indent=2) + "\n")
    make_tiny_tokenizer(folder, vocabulary=shape.vocabulary, questions=questions)
    return folder
