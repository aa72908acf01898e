"""A reshard plan as a person or a script reads it: who holds which rows, what moves, what is not possible."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from jetrl_conversion.errors import LayoutError
from jetrl_conversion.layout import blocks, placements, shard_of
from jetrl_conversion.model_spec import ModelSpec, Rule, pattern
from jetrl_conversion.parallel import Layout, shard_count
from jetrl_conversion.planner import Plan, violations

_KEYS = {"megatron": ("tp", "pp", "ep", "etp", "dp"), "vllm": ("tp", "ep", "dp")}


def parse_layout(kind: Literal["megatron", "vllm"], text: str) -> Layout:
    """`tp=4,pp=2,ep=1` -> Layout.

    Raises:
        LayoutError: unknown key (the nearest is named), a value that is not a positive integer, a key twice.
    """
    sizes: dict[str, int] = {}
    problems = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, _, value = (s.strip() for s in part.partition("="))
        if key not in _KEYS[kind]:
            near = difflib.get_close_matches(key, _KEYS[kind], n=1, cutoff=0.3)
            hint = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"layout {text!r}: no size {key!r} (known: {', '.join(_KEYS[kind])}){hint}")
        elif not value.isdecimal() or int(value) < 1:
            problems.append(f"layout {text!r}: {key} must be a positive integer, it is {value!r}")
        elif key in sizes:
            problems.append(f"layout {text!r}: {key} is given twice")
        else:
            sizes[key] = int(value)
    if problems:
        raise LayoutError(problems)
    return Layout(kind, **sizes)  # type: ignore[arg-type]


def describe(spec: ModelSpec, src: Layout, dst: Layout, plan: Plan | None) -> dict[str, Any]:
    """Everything about a plan as JSON. `plan` None: the layouts are impossible, only violations are filled in.

    Keys: model, train, rollout (sizes and world), violations [{tensor, layout, reason, fatal}], tensors [{name, shape,
    layers, experts, format, bytes_moved, train, rollout}] where each side lists its different shards: the local name,
    its ranks, and [first row, last row, first column, last column] in the Hugging Face tensor; bytes_sent and
    bytes_received by rank.
    """
    found: dict[str, Any] = {
        "model": {"architecture": spec.architecture, "layers": spec.num_layers, "hidden_size": spec.hidden_size},
        "train": _sizes(src),
        "rollout": _sizes(dst),
        "violations": [
            {"tensor": v.hf_name, "layout": v.layout, "reason": v.reason, "fatal": v.fatal}
            for v in violations(spec, src, dst)
        ],
    }
    if plan is None:
        return found
    found["tensors"] = [_tensor(spec, rule, plan) for rule in spec.rules()]
    found["bytes_sent"] = {str(k): v for k, v in plan.bytes_sent().items()}
    found["bytes_received"] = {str(k): v for k, v in plan.bytes_received().items()}
    found["bytes_total"] = plan.total_bytes
    return found


def _sizes(layout: Layout) -> dict[str, Any]:
    return {"engine": layout.kind, "tp": layout.tp, "pp": layout.pp, "ep": layout.ep, "expert_tp": layout.expert_tp,
            "copies": layout.dp, "ranks": layout.world}  # fmt: skip


def _tensor(spec: ModelSpec, rule: Rule, plan: Plan) -> dict[str, Any]:
    layers = plan.quantized.get(rule, frozenset())
    count = len(spec.layers(rule))
    form = "BF16" if not layers else "FP8" if len(layers) == count else f"FP8 in {len(layers)} of {count} layers"
    return {
        "name": pattern(rule),
        "shape": list(spec.shape(rule)),
        "layers": count if rule.row.where != "model" else None,
        "experts": rule.experts if rule.experts > 1 else None,
        "format": form,
        "bytes_moved": plan.bytes_of(rule),
        "train": _shards(spec, rule, plan.src),
        "rollout": _shards(spec, rule, plan.dst),
        **({"train_experts": _experts(rule, plan.src), "rollout_experts": _experts(rule, plan.dst)}
           if rule.experts > 1 else {}),
    }  # fmt: skip


def _experts(rule: Rule, layout: Layout) -> list[dict[str, Any]]:
    """Which ranks of a stage hold which experts (first, last)."""
    groups: dict[int, list[int]] = {}
    for rank in range(layout.inner):
        groups.setdefault(layout.coords(rank).ep, []).append(rank)
    each = rule.experts // layout.ep
    return [{"experts": [ep * each, (ep + 1) * each - 1], "stage_ranks": groups[ep]} for ep in range(layout.ep)]


def _shards(spec: ModelSpec, rule: Rule, layout: Layout) -> list[dict[str, Any]]:
    name = placements(spec, rule, layout)[0].name
    ranks: dict[int, list[int]] = {}
    for rank in range(layout.inner):
        ranks.setdefault(shard_of(rule, layout, layout.coords(rank)), []).append(rank)
    return [
        {
            "local_name": name,
            "stage_ranks": ranks[shard],
            "rows_and_columns": [
                [b.row, b.row + b.rows - 1, b.col, b.col + b.cols - 1] for b in blocks(spec, rule, layout, shard)
            ],
        }
        for shard in range(shard_count(rule, layout))
    ]


def table(found: dict[str, Any]) -> str:
    """The same as text: one line per tensor, then bytes per rank, then violations."""
    train, rollout = found["train"], found["rollout"]
    head = f"train {_text(train)} -> rollout {_text(rollout)}"
    lines = [head]
    if "tensors" in found:
        rows = [("tensor", "shape", "format", "GB moved", "train: rank in stage: rows", "rollout: rank: rows")]
        for t in found["tensors"]:
            shape = "x".join(map(str, [*([t["experts"]] if t["experts"] else []), *t["shape"]]))
            train_rows, rollout_rows = (
                _each(t.get(f"{side}_experts")) + _rows(t[side], t["shape"]) for side in ("train", "rollout")
            )
            rows.append((t["name"], shape, t["format"], f"{t['bytes_moved'] / 1e9:.3f}", train_rows, rollout_rows))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines += ["  ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[5]]) for row in rows]
        lines += ["", f"moved in all: {found['bytes_total'] / 1e9:.3f} GB"]
        lines += ["sent by train rank:     " + _by_rank(found["bytes_sent"])]
        lines += ["received by rollout rank: " + _by_rank(found["bytes_received"])]
    lines.append("")
    kept = [v for v in found["violations"] if not v["fatal"]]
    fatal = [v for v in found["violations"] if v["fatal"]]
    lines += [f"IMPOSSIBLE {v['tensor']} in {v['layout']}: {v['reason']}" for v in fatal]
    lines += [f"kept BF16 {v['tensor']} in {v['layout']}: {v['reason']}" for v in kept]
    return "\n".join([*lines, *([] if kept or fatal else ["no violations"])])


def _text(sizes: dict[str, Any]) -> str:
    return f"{sizes['engine']} tp={sizes['tp']} pp={sizes['pp']} ep={sizes['ep']} ({sizes['ranks']} ranks)"


def _each(experts: list[dict[str, Any]] | None) -> str:
    if not experts:
        return ""
    first, last = experts[0]["experts"]
    return f"{last - first + 1} experts a rank: "


def _rows(shards: list[dict[str, Any]], shape: list[int]) -> str:
    """`0: 0-1023 | 1: 1024-2047`, shortened after three shards; columns where those are what is cut."""
    if len(shards) == 1:
        return "all"
    parts = []
    for number, shard in enumerate(shards[:3]):
        boxes = shard["rows_and_columns"]
        by_cols = len(shape) > 1 and boxes and boxes[0][3] - boxes[0][2] + 1 < shape[1]
        spans = [f"cols {b[2]}-{b[3]}" if by_cols else f"{b[0]}-{b[1]}" for b in boxes[:2]]
        parts.append(f"{number}: " + ",".join(spans) + (",.." if len(boxes) > 2 else ""))
    return " | ".join(parts) + (f" | .. {len(shards)} shards" if len(shards) > 3 else "")


def _by_rank(counts: dict[str, int]) -> str:
    """`0-3: 1.20 GB, 4-7: 1.10 GB`: runs of ranks whose bytes round to the same."""
    runs: list[tuple[int, int, str]] = []
    for key, value in counts.items():
        rank, text = int(key), f"{value / 1e9:.3f} GB"
        if runs and runs[-1][2] == text:
            runs[-1] = (runs[-1][0], rank, text)
        else:
            runs.append((rank, rank, text))
    shown = [f"{a}: {t}" if a == b else f"{a}-{b}: {t}" for a, b, t in runs[:8]]
    if len(runs) > 8:
        low, high = min(counts.values()) / 1e9, max(counts.values()) / 1e9
        shown.append(f".. ({len(counts)} ranks, {low:.3f} to {high:.3f} GB)")
    return ", ".join(shown)
