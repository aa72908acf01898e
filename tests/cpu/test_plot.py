"""Pictures of runs: all panels filled, zeros visible, errors that say where runs are."""

from pathlib import Path

import pytest

from jetrl_megatron.commands.plot import _differences, _labels, _smooth, load, plot
from jetrl_megatron.config import ConfigError
from jetrl_megatron.metrics import REQUIRED, MetricsWriter


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    folders = []
    for name, difference in (("jetrl", 0.0), ("mixed", 0.2), ("bf16", 1e-8)):
        with MetricsWriter(tmp_path / name, 6) as writer:
            writer.resume(0)
            for step in range(1, 7):
                values = dict.fromkeys(REQUIRED, 1.0) | {
                    "step": step,
                    "reward_mean": step / 10,
                    "logprob_abs_diff_mean": difference if step != 3 else float("nan"),
                    "kl_k3": difference**2 - 1e-18,
                    "refit_tensors": 2,
                    "refit_tensors_mismatched": 0,
                    "step_seconds": 4.0,
                }
                writer.log(values | ({"eval_pass_at_1": 0.5} if step == 4 else {}))
        folders.append(tmp_path / name)
    return folders


def test_png_of_several_runs(runs, tmp_path):
    from matplotlib.image import imread

    image = imread(plot(runs, tmp_path / "deep" / "er.png"))
    height, width, _ = image.shape
    assert (width, height) == (1800, 1140)
    quarters = [image[a : a + 570, b : b + 900, :3] for a in (0, 570) for b in (0, 900)]
    assert all((q < 0.9).any(axis=2).mean() > 0.005 for q in quarters)  # something is drawn in each panel
    one = imread(plot(runs[:1], tmp_path / "one.png"))
    assert (one != image).any()


def test_zeros_are_drawn_on_a_labelled_floor_under_everything(runs):
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    _differences(axis, load(runs), "logprob_abs_diff_mean", "t", "u")
    exact, mixed, bf16 = ([y for y in line.get_ydata() if y == y] for line in axis.get_lines()[0:6:2])
    floor = exact[0]
    assert exact == [floor] * 5 and floor < min(bf16) < min(mixed) == 0.2
    assert axis.get_yticks()[0] == floor and axis.get_yticklabels()[0].get_text() == "0"
    assert axis.get_ylim()[0] < floor
    assert "exactly equal" in [text.get_text() for text in axis.texts]


def test_all_zero_and_no_zero(runs):
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    _differences(axis, load(runs[:1]), "logprob_abs_diff_mean", "t", "u")
    assert [text.get_text() for text in axis.get_yticklabels()] == ["0"]
    axis = Figure().subplots()
    _differences(axis, load(runs[1:2]), "logprob_abs_diff_mean", "t", "u")
    assert not axis.texts and axis.get_ylim()[0] > 0


def test_errors_name_every_folder_and_the_runs_beside(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError) as error:
        plot([tmp_path / "jetlr", tmp_path / "empty", tmp_path / "begun", runs[0]], tmp_path / "x.png")
    missing, empty, begun = error.value.problems
    assert missing.startswith(f"{tmp_path}/jetlr: no such folder; runs in {tmp_path}: ") and "jetrl, mixed" in missing
    assert "holds no metrics.jsonl" in empty and "no finished step" in begun
    with pytest.raises(ConfigError, match="which runs"):
        plot([], tmp_path / "x.png")
    with pytest.raises(ConfigError, match=r"\.png"):
        plot(runs, tmp_path / "x.pdf")


def test_labels_tell_runs_apart():
    assert list(_labels([Path("/a/x/run"), Path("/a/y/run")]).values()) == ["x/run", "y/run"]
    assert list(_labels([Path("/a/x"), Path("/a/y")]).values()) == ["x", "y"]


def test_smoothing_skips_gaps():
    assert _smooth([1.0, float("nan"), 3.0]) == [1.0, 1.0, 2.0]
    assert _smooth([0.0] * 5 + [5.0])[-1] == 1.0
