#!/bin/bash
# Installs everything that a Hopper node runs into .venv of this repository: torch, vLLM and Megatron-core from wheels,
# Transformer Engine's torch part from its source package (about 13 minutes on two cores, a few on a whole node).
#
#   slurm/install_gpu.sh           install; needs nvcc 13 (module load cuda/13, or CUDA_HOME) and 25 GB of disk
#   slurm/install_gpu.sh --check   say what would be installed and what is missing here; install nothing
#   slurm/install_gpu.sh --apex    also build NVIDIA's apex from its sources (docs/install-gpu.md says what for)
#
# Run it once, on a node with nvcc, in a folder that all nodes see. Versions are pinned in pyproject.toml alone.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
mode=${1:-install}
case $mode in
install | --check | --apex) ;;
*)
    echo "error: unknown option $mode: nothing, --check or --apex" >&2
    exit 2
    ;;
esac

# The repository's own bootstrap brings uv where there is none.
uv --version >/dev/null 2>&1 || uv() { "$root/.bin/uv" "$@"; }
problems=()
uv --version >/dev/null 2>&1 || problems+=("uv is missing: pip install uv")
nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc
if ! command -v "$nvcc" >/dev/null; then
    problems+=("nvcc is missing: load a CUDA 13 module, or set CUDA_HOME")
elif ! "$nvcc" --version | grep -q "release 13"; then
    problems+=("$nvcc is not of CUDA 13: $("$nvcc" --version | grep release)")
fi
free=$(df --output=avail -BG . | tail -n 1 | tr -dc 0-9)
[ "$free" -ge 25 ] || problems+=("$free GB are free here, 25 are needed")

# The CUDA, cuDNN and NCCL headers that the nvidia wheels carry, for the compiler.
include_path() {
    find "$1" -path '*/nvidia/*/include' -type d -prune 2>/dev/null | sort | paste -sd :
}

pins() {
    uv export --quiet --no-group cpu --group gpu --no-emit-project --no-hashes --no-annotate --no-header
}

if [ "$mode" = --check ]; then
    if uv --version >/dev/null 2>&1; then
        echo "would install $(pins | wc -l) packages, among them:"
        pins | grep -E '^(torch|vllm|megatron-core|transformer-engine[a-z0-9-]*|nemo-run|transformers)=='
    fi
    for problem in "${problems[@]}"; do
        echo "missing: $problem"
    done
    exit 0
fi
if [ ${#problems[@]} -gt 0 ]; then
    printf 'error: %s\n' "${problems[@]}" >&2
    exit 1
fi

# Bytecode now: in an image that nobody can write to, every rank would compile at every start.
export UV_COMPILE_BYTECODE=1
uv sync --no-group cpu --group gpu --no-install-package transformer-engine-torch
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
CPATH="$(include_path "$site")${CPATH:+:$CPATH}"
export CPATH NVTE_FRAMEWORK=pytorch NVTE_CUDA_ARCHS=90 MAX_JOBS="${MAX_JOBS:-$(nproc)}"
te=$(pins | grep '^transformer-engine-torch==' | cut -d' ' -f1)
uv pip install setuptools wheel pybind11 ninja
uv pip install --no-build-isolation --no-deps "$te"

if [ "$mode" = --apex ]; then
    # From NVIDIA's sources: the package called `apex` on PyPI is another project.
    [ -d build/apex ] || git clone --depth 1 https://github.com/NVIDIA/apex build/apex
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 uv pip install --no-build-isolation --no-deps ./build/apex
fi

.venv/bin/python - <<'PY'
import megatron.core, torch, transformer_engine.pytorch, vllm
print(f"torch {torch.__version__}, vllm {vllm.__version__}, megatron-core {megatron.core.__version__}, "
      f"{torch.cuda.device_count()} GPU(s)")
PY
