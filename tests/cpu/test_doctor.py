"""The doctor: reports what is here, says why a backend is off, and fails when something needed does not work."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

from jetrl_megatron.commands import doctor, doctor_checks
from jetrl_megatron.commands.doctor_checks import Backend, Check, Variable, agreement, import_problem
from jetrl_megatron.config import Config, ConfigError


def backend(module, code):
    return Backend("X", module, code, True, True, "nothing works")


@pytest.mark.slow
def test_report_of_this_machine():
    # A process of its own: some of the libraries that it imports take hold of standard output.
    command = [sys.executable, "-m", "jetrl_megatron.cli", "doctor", "tiny_cpu_jetrl", "--json"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=280)
    report = json.loads(finished.stdout)
    found = {(c["group"], c["name"]): c for c in report["checks"]}
    assert found["backends", "vLLM"]["status"] == found["backends", "Megatron-core"]["status"] == "ok"
    assert found["versions", "torch"]["detail"] == version("torch").split("+")[0]
    assert found["kernels", "batch invariance"]["status"] == "ok"
    assert found["agreement", "precision"]["detail"].startswith("FP8 on both sides: E4M3, pow2")
    assert {"name", "trainer", "engine", "job_default", "agrees"} == set(report["variables"][0])
    failed = [c for c in report["checks"] if c["status"] == "fail"]
    assert report["healthy"] is (not failed) and finished.returncode == bool(failed)
    assert not failed, failed


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="tiny_cpu_jetrl"):
        doctor.run("tiny_cpu_jetlr")


@pytest.mark.parametrize(
    ("module", "code", "says"),
    [
        ("json", "import json", None),
        ("no_such_module_x", "import no_such_module_x", "not installed"),
        ("no_such.module_x", "import no_such.module_x", "not installed"),
        ("json", "from json import nothing_x", "nothing_x"),
        ("json", "import os; os.abort()", "signal 6"),
        ("json", "raise SystemExit(3)", "its import failed"),
    ],
)
def test_reasons(module, code, says):
    problem = import_problem(backend(module, code))
    assert problem is None if says is None else says in (problem or "")


def test_hanging_import_ends(monkeypatch):
    monkeypatch.setattr(doctor_checks, "IMPORT_SECONDS", 0.5)
    assert "did not end in 0.5 s" in (import_problem(backend("json", "import time; time.sleep(60)")) or "")


def test_needed_and_unneeded_backends(monkeypatch):
    broken = (Backend("A", "no_such_a", "", True, True, "-"), Backend("B", "no_such_b", "", False, True, "-"))
    monkeypatch.setattr(doctor_checks, "BACKENDS", broken)

    def status(gpu):
        return [c.status for c in doctor_checks.backends(None, gpu) if c.name in "AB"]

    assert status(gpu=False) == ["fail", "off"] and status(gpu=True) == ["fail", "fail"]


def test_transformer_engine_counts_only_for_recipes_that_use_it(monkeypatch):
    engine = [b for b in doctor_checks.BACKENDS if b.name == "Transformer Engine"]
    monkeypatch.setattr(doctor_checks, "BACKENDS", engine)
    monkeypatch.setattr(doctor_checks, "import_problem", lambda b: "not installed")
    config = Config()
    assert next(iter(doctor_checks.backends(config, True))).status == "off"
    config.precision.linear_backend = "te"
    assert next(iter(doctor_checks.backends(config, True))).status == "fail"


def test_versions_against_pins(monkeypatch):
    assert all(c.status != "fail" for c in doctor_checks.versions())
    monkeypatch.setattr(doctor_checks, "installed", lambda name: "0.1" if name in ("torch", "vllm") else None)
    found = {c.name: c for c in doctor_checks.versions()}
    assert found["torch"].status == found["vllm"].status == "note"
    assert found["vllm"].detail == "0.1, tested with ==0.26.0"


def test_variables_that_differ_fail_and_one_sided_ones_do_not():
    same = Variable("numbers: GPU", "NVIDIA_TF32_OVERRIDE", "0", "0", None)
    one_sided = Variable("numbers: CPU", "TORCHDYNAMO_DISABLE", None, "1", None)
    apart = Variable("numbers: CPU", "ONEDNN_MAX_CPU_ISA", "AVX2", None, None)
    assert [c.status for c in agreement([same, one_sided], None)] == ["ok"]
    (check,) = agreement([same, apart], None)
    assert check == Check("agreement", "ONEDNN_MAX_CPU_ISA", "fail", "'AVX2' in the trainer, None in the engine")


def test_variables_come_from_the_one_list(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    found = {v.name: v for v in doctor_checks.variables(gpu=False)}
    assert found["ONEDNN_MAX_CPU_ISA"].trainer == found["ONEDNN_MAX_CPU_ISA"].engine == "AVX2"
    assert found["TORCHDYNAMO_DISABLE"].engine == "1"
    assert found["VLLM_USE_DEEP_GEMM_E8M0"].job == "0"
    assert "NCCL_DEBUG" not in found and "HF_HOME" not in found


@pytest.mark.parametrize(
    ("mode", "status", "says"), [("bf16", "ok", "BF16 on"), ("mixed", "note", "by design"), ("jetrl", "ok", "FP8")]
)
def test_precision_line(mode, status, says):
    config = Config()
    config.precision.mode = mode
    check = next(c for c in agreement([], config) if c.name == "precision")
    assert check.status == status and says in check.detail


def test_recipe_that_does_not_fit(tmp_path):
    config = Config()
    config.train.device, config.model.path = "cuda", str(tmp_path)
    found = {c.name: c for c in agreement([], config) if c.group == "recipe"}
    import torch

    if not torch.cuda.is_available():
        assert found["devices"].status == "fail"
    assert found["model"].status == "fail" and "config.json" in found["model"].detail


def test_layout_that_breaks_tiles_is_listed(tmp_path):
    from jetrl_megatron.tiny import TinySizes, tiny_config

    (tmp_path / "config.json").write_text(json.dumps(tiny_config(TinySizes()) | {"head_dim": 64}))
    config = Config()
    config.model.path, config.parallel.tp = str(tmp_path), 2
    layout = [c for c in agreement([], config) if c.name == "layout"]
    assert all(c.status == "fail" for c in layout)
    assert {name for name in "qkvo" if any(f".{name}_proj.weight: " in c.detail for c in layout)} == set("qkvo")


def test_tables_and_exit_status(monkeypatch, capsys):
    bad = [Check("backends", "vLLM", "fail", "no [such] module"), Check("devices", "gpu", "off", "none")]
    monkeypatch.setattr(
        doctor, "examine", lambda config: (bad, [Variable("numbers: CPU", "MKL_CBWR", "AVX2", None, None)])
    )
    assert doctor.run() == 1
    out = capsys.readouterr().out
    assert "FAIL" in out and "no [such] module" in out and "not usable: backends/vLLM" in out and "MKL_CBWR" in out
    monkeypatch.setattr(doctor, "examine", lambda config: (bad[1:], []))
    assert doctor.run(as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["healthy"] is True
