"""`jetrl verify checkpoint`: are two checkpoints the same, to the bit or in their logits?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

    from jetrl_conversion.sources import Source

PROMPTS = (
    "The capital of France is",
    "Question: Natalia sold 48 clips in April and half as many in May. How many clips in all? Answer:",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Es war einmal ein alter König, der",
)
"""Read by both models when --logits is given: prose, arithmetic, code, another language."""


def checkpoint(
    a: Annotated[Path, typer.Argument(help="Hugging Face, block-FP8 or Megatron folder.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Another, in any of these forms.", show_default=False)],
    config: Annotated[Path | None, typer.Option(help="config.json of a Megatron folder that has none.")] = None,
    logits: Annotated[bool, typer.Option("--logits", help="Compare logits on prompts instead of bytes.")] = False,
    prompts: Annotated[Path | None, typer.Option(help="Text file, one prompt a line, for --logits.")] = None,
    tolerance: Annotated[float, typer.Option(help="Largest difference of a logit that still passes.")] = 0.0,
) -> None:
    """Compare two checkpoints: byte digests of every tensor, whatever the two layouts, or logits.

    Exit status 1 if they differ; says what differs first, and by how much.

    Example: jetrl verify checkpoint Qwen3-8B Qwen3-8B-megatron
    """
    from jetrl_conversion.sources import open_source

    x, y = (open_source(path, config if (path / "metadata.json").is_file() else None) for path in (a, b))
    same = _compare_logits(x, y, _read_prompts(prompts), tolerance) if logits else _compare_bytes(x, y)
    if not same:
        raise typer.Exit(1)


def _compare_bytes(a: Source, b: Source) -> bool:
    from jetrl_conversion.verify import compare

    found = compare(a, b)
    for line in found.notes:
        typer.echo(line)
    if found.equal:
        typer.echo(f"equal: {len(found.digests)} tensors, the same bytes")
        return True
    for line in found.structure[:20]:
        typer.echo(line)
    if len(found.structure) > 20:
        typer.echo(f"... and {len(found.structure) - 20} more")
    typer.echo(f"{len(found.different)} of {len(found.digests)} tensors differ")
    if found.first is not None:
        typer.echo(f"first: {found.first}")
    return False


def _read_prompts(file: Path | None) -> list[str]:
    if file is None:
        return list(PROMPTS)
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{file}: holds no prompt")
    return lines


def _compare_logits(a: Source, b: Source, prompts: list[str], tolerance: float) -> bool:
    """Run both models in transformers, BF16 weights on the CPU, one after the other."""
    import torch

    ids = _tokens(a, prompts)
    left, right = _logits(a, ids), _logits(b, ids)
    worst, where, agree, total, kl = 0.0, None, 0, 0, 0.0
    for number, (x, y) in enumerate(zip(left, right)):
        gap = (x - y).abs().amax(dim=-1)
        over = (gap > tolerance).nonzero()
        if where is None and len(over):
            token = int(over[0])
            where = f"prompt {number} ({prompts[number][:40]!r}), token {token}: {float(gap[token]):.6g}"
        worst = max(worst, float(gap.max()))
        agree += int((x.argmax(-1) == y.argmax(-1)).sum())
        total += x.shape[0]
        p, q = torch.log_softmax(x, -1), torch.log_softmax(y, -1)
        kl += float((p.exp() * (p - q)).sum())
    typer.echo(f"{len(prompts)} prompts, {total} tokens: largest logit difference {worst:.6g}, "
               f"mean KL {kl / total:.3g}, same best token at {agree} of {total}")  # fmt: skip
    if where is not None:
        typer.echo(f"first difference over {tolerance:g}: {where}")
    return where is None


def _tokens(source: Source, prompts: list[str]) -> list[list[int]]:
    """Token ids by the model's own tokenizer; without one, the prompts' bytes serve as ids."""
    files = {file.name: file for file in source.side_files()}
    if "tokenizer.json" in files or "tokenizer.model" in files:
        from transformers import AutoTokenizer

        folder = next(iter(files.values())).parent
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return [tokenizer(prompt)["input_ids"] for prompt in prompts]
    typer.echo("no tokenizer in the folder: the bytes of the prompts are used as token ids")
    return [[byte % source.spec.vocab_size for byte in prompt.encode()] for prompt in prompts]


def _logits(source: Source, ids: list[list[int]]) -> list[torch.Tensor]:
    """Logits [tokens, vocabulary] in FP32 of each prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    from jetrl_conversion.convert import write_hf

    with tempfile.TemporaryDirectory(prefix="jetrl-verify-") as scratch:
        folder = Path(scratch) / "model"
        write_hf(source, folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False).eval()
        with torch.no_grad():
            return [model(torch.tensor([prompt])).logits[0].float() for prompt in ids]
