"""`jetrl plot`: runs over each other in one picture."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl_megatron.config import ConfigError
from jetrl_megatron.metrics import METRICS, read_metrics

COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#64748b")
PHASES = (
    ("rollout_seconds", "rollout", "#60a5fa"),
    ("train_seconds", "train", "#fb923c"),
    ("refit_seconds", "refit", "#34d399"),
)
OTHER = ("other", "#cbd5e1")
SMOOTH = 5
"""Steps averaged by the bold line of the reward; the thin one shows every step."""


@dataclass(frozen=True)
class Series:
    """One run: its label and its lines of metrics."""

    label: str
    rows: list[dict[str, Any]]

    def values(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values where the run has this figure; null is shown as a gap."""
        pairs = [(row["step"], row.get(key)) for row in self.rows]
        return [s for s, _ in pairs], [math.nan if v is None else float(v) for _, v in pairs]


def plot(folders: list[Path], output: Path) -> Path:
    """Draw reward, KL, log-prob difference and times of the runs in `folders` into one PNG.

    Returns:
        The path written.

    Raises:
        ConfigError: listing every folder that is missing, holds no metrics or no finished step.
        ValueError: a line of metrics is broken.
    """
    series = load(folders)
    if output.suffix != ".png":
        raise ConfigError([f"--output {output}: the picture is a .png"])
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(_style()):
        figure, axes = pyplot.subplots(2, 2, figsize=(12, 7.6), layout="constrained")
        _reward(axes[0, 0], series)
        _differences(axes[0, 1], series, "kl_k3", "KL(engine ‖ trainer), k3 estimate", "nats per token")
        _differences(
            axes[1, 0], series, "logprob_abs_diff_mean", "Log-prob difference, trainer against engine", "mean |Δ log p|"
        )
        _times(axes[1, 1], series)
        figure.legend(
            *axes[0, 0].get_legend_handles_labels(),
            loc="outside upper center",
            ncols=min(len(series), 4),
            frameon=False,
        )
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=150)
        pyplot.close(figure)
    return output


def load(folders: list[Path]) -> list[Series]:
    """Read the runs; labels are the shortest ends of the paths that tell them apart."""
    problems, rows = [], {}
    for folder in dict.fromkeys(folders):
        if not folder.is_dir():
            problems.append(f"{folder}: no such folder{_near(folder)}")
        elif not (folder / METRICS).is_file():
            problems.append(f"{folder}: holds no {METRICS}{_near(folder / 'x')}")
        else:
            rows[folder] = read_metrics(folder)
            if not rows[folder]:
                problems.append(f"{folder}: {METRICS} holds no finished step yet")
    if problems or not folders:
        raise ConfigError(problems or ["which runs? e.g. jetrl plot outputs/tiny_cpu_jetrl outputs/tiny_cpu_mixed"])
    return [Series(label, rows[folder]) for folder, label in _labels(list(rows)).items()]


def _near(folder: Path) -> str:
    """Runs beside a folder that is none, as a hint."""
    beside = sorted(p.parent.name for p in folder.parent.glob(f"*/{METRICS}")) if folder.parent.is_dir() else []
    return f"; runs in {folder.parent}: {', '.join(beside[:8])}" if beside else ""


def _labels(folders: list[Path]) -> dict[Path, str]:
    for depth in range(1, 20):
        labels = {folder: "/".join(folder.resolve().parts[-depth:]) for folder in folders}
        if len(set(labels.values())) == len(folders):
            return labels
    return {folder: str(folder) for folder in folders}


def _style() -> dict[str, Any]:
    return {
        "font.size": 10,
        "font.family": "DejaVu Sans",
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#94a3b8",
        "axes.labelcolor": "#475569",
        "xtick.color": "#475569",
        "ytick.color": "#475569",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e2e8f0",
        "lines.linewidth": 2.0,
    }


def _steps_axis(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _reward(axis: Any, series: list[Series]) -> None:
    for color, run in zip(_colors(series), series):
        steps, values = run.values("reward_mean")
        axis.plot(steps, values, color=color, alpha=0.25, linewidth=1)
        axis.plot(steps, _smooth(values), color=color, label=run.label)
        points = [(s, v) for s, v in zip(*run.values("eval_pass_at_1")) if not math.isnan(v)]
        if points:
            axis.plot(*zip(*points), "o", color=color, markersize=5, markerfacecolor="white")
    evaluated = any(row.get("eval_pass_at_1") is not None for run in series for row in run.rows)
    axis.set_title(f"Mean reward (mean of {SMOOTH} steps{'; circles: pass@1 held out' if evaluated else ''})")
    axis.set_ylabel("reward")
    axis.set_ylim(bottom=0)
    _steps_axis(axis)


def _differences(axis: Any, series: list[Series], key: str, title: str, unit: str) -> None:
    """A log scale with a floor line for exact zeros, which a log scale would hide: they are the aim here."""
    shown = {run.label: run.values(key) for run in series}
    positive = [v for _, values in shown.values() for v in values if v > 0]
    # Zeros sit one decade under the smallest positive value, on their own tick. Estimates below zero are zeros but
    # for rounding (k3 cannot be negative).
    floor = 10.0 ** (math.floor(math.log10(min(positive))) - 1) if positive else 0.1
    any_zero = False
    for color, run in zip(_colors(series), series):
        steps, values = shown[run.label]
        zero = [v <= 0 for v in values]
        any_zero |= any(zero)
        axis.plot(steps, [floor if z else v for v, z in zip(values, zero)], color=color)
        axis.plot([s for s, z in zip(steps, zero) if z], [floor] * sum(zero), "o", color=color, markersize=3.5)
    axis.set_yscale("log")
    top = 10.0 ** math.ceil(math.log10(max(positive, default=1.0) * 1.01))
    # Room under the floor for its label, whatever the number of decades.
    bottom = floor / (top / floor) ** 0.09 if any_zero else min(positive, default=floor) / 2
    axis.set_ylim(bottom, top)
    if any_zero:
        from matplotlib.ticker import NullLocator

        low = math.floor(math.log10(min(positive))) if positive else 0
        high = round(math.log10(top))
        stride = max(1, math.ceil((high - low + 1) / 6))
        ticks = [10.0**e for e in range(high, low - 1, -stride)][::-1] if positive else []
        axis.set_yticks([floor, *ticks], ["0", *(f"$10^{{{round(math.log10(t))}}}$" for t in ticks)])
        axis.yaxis.set_minor_locator(NullLocator())
        axis.axhline(floor, color="#94a3b8", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        axis.annotate("exactly equal", (1, floor), xycoords=("axes fraction", "data"), xytext=(0, -4),
                      textcoords="offset points", ha="right", va="top", color="#64748b", fontsize=8.5)  # fmt: skip
    axis.set_title(title)
    axis.set_ylabel(unit)
    _steps_axis(axis)


def _times(axis: Any, series: list[Series]) -> None:
    """Where an average step's time goes; the first step, which compiles and warms up, is left out if there are more."""
    for place, run in enumerate(series):
        rows = run.rows[1:] or run.rows
        total = sum(row["step_seconds"] for row in rows) / len(rows)
        left = 0.0
        for key, _, color in PHASES:
            width = sum(row[key] for row in rows) / len(rows)
            _bar(axis, place, left, width, total, color)
            left += width
        _bar(axis, place, left, max(total - left, 0.0), total, OTHER[1])
        axis.annotate(f"{total:.1f} s", (total, place), xytext=(5, 0), textcoords="offset points", va="center",
                      color="#334155", fontsize=9)  # fmt: skip
    axis.set_yticks(range(len(series)), [run.label for run in series])
    axis.set_ylim(len(series) - 0.4, -0.6)
    axis.margins(x=0.12)
    axis.grid(axis="y", visible=False)
    axis.set_title("Time of a step (mean)")
    axis.set_xlabel("seconds")
    from matplotlib.patches import Patch

    names = [(name, color) for _, name, color in PHASES] + [OTHER]
    axis.legend(handles=[Patch(color=c, label=n) for n, c in names], loc="upper left", bbox_to_anchor=(0, -0.16),
                ncols=4, frameon=False, fontsize=9, handlelength=1, borderaxespad=0)  # fmt: skip


def _bar(axis: Any, place: int, left: float, width: float, total: float, color: str) -> None:
    axis.barh(place, width, left=left, color=color, height=0.55, edgecolor="white", linewidth=0.8)
    if total and width / total > 0.09:
        axis.text(left + width / 2, place, f"{width:.1f}", ha="center", va="center", color="#0f172a", fontsize=8.5)


def _smooth(values: list[float]) -> list[float]:
    """Mean of the last `SMOOTH` finite values."""
    out = []
    for end in range(1, len(values) + 1):
        window = [v for v in values[max(0, end - SMOOTH) : end] if not math.isnan(v)]
        out.append(sum(window) / len(window) if window else math.nan)
    return out


def _colors(series: list[Series]) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(len(series))]


def run(folders: list[Path], output: Path, as_json: bool = False) -> None:
    """Plot and print where the picture is; `as_json` prints path and labels for scripts."""
    path = plot(folders, output)
    if as_json:
        print(json.dumps({"output": str(path), "runs": [s.label for s in load(folders)]}))
    else:
        print(f"wrote {path}")
