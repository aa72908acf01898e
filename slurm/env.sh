#!/bin/bash
# The only list of environment variables of a job. Everything that changes numbers, communication or caches is here:
# these names reach the container (`--container-env`), are printed with their effective values when a job starts, and
# must be equal on the trainer's and the engine's side. jetrl_megatron/env_list.py reads this file; nothing else lists them.
#
#   default NAME VALUE   set to VALUE unless the user or the site has set it
#   pass NAME            left to the library's own default, handed on where it is set
#
# One per line. Values are printed in logs: no tokens, no passwords.
# Source it (`. slurm/env.sh`): afterwards JETRL_ENV_NAMES holds every name that has a value, comma separated.

JETRL_ENV_NAMES=""

_jetrl_listed() {
    [ -z "${!1+set}" ] || JETRL_ENV_NAMES="${JETRL_ENV_NAMES:+$JETRL_ENV_NAMES,}$1"
}

default() {
    export "$1=${!1-$2}"
    _jetrl_listed "$1"
}

pass() {
    if [ -n "${!1+set}" ]; then export "${1?}"; fi
    _jetrl_listed "$1"
}

# --- numbers: GPU ---
# vLLM's first choice for block FP8 on Hopper quantizes by itself, with FP32 scales, below 32 rows.
default VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER 0
# Requantizes weights in place when loading and at every refit.
default VLLM_USE_DEEP_GEMM_E8M0 0
pass VLLM_USE_DEEP_GEMM
pass VLLM_BATCH_INVARIANT
pass VLLM_FLASH_ATTN_VERSION
pass NVTE_FP8_BLOCK_SCALING_FP32_SCALES
pass NVTE_ALLOW_NONDETERMINISTIC_ALGO
pass NVTE_FLASH_ATTN
pass NVTE_FUSED_ATTN
pass NVTE_UNFUSED_ATTN
pass NVTE_NORM_FWD_USE_CUDNN
pass NVIDIA_TF32_OVERRIDE
pass TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
pass CUBLAS_WORKSPACE_CONFIG
pass FLASH_ATTENTION_DETERMINISTIC

# --- numbers: CPU ---
pass ATEN_CPU_CAPABILITY
pass ONEDNN_MAX_CPU_ISA
pass MKL_CBWR
pass TORCHDYNAMO_DISABLE

# --- communication ---
# Megatron needs one hardware queue: tensor-parallel collectives must start before the GEMM that hides them.
default CUDA_DEVICE_MAX_CONNECTIONS 1
default NCCL_DEBUG WARN
default TORCH_NCCL_ASYNC_ERROR_HANDLING 1
pass NCCL_SOCKET_IFNAME
pass NCCL_NET
pass NCCL_NET_PLUGIN
pass NCCL_IB_HCA
pass NCCL_IB_DISABLE
pass NCCL_IB_GID_INDEX
pass NCCL_IB_TC
pass NCCL_IB_SL
pass NCCL_IB_TIMEOUT
pass NCCL_IB_QPS_PER_CONNECTION
pass NCCL_CROSS_NIC
pass NCCL_ALGO
pass NCCL_PROTO
pass NCCL_MIN_NCHANNELS
pass NCCL_MAX_NCHANNELS
pass NCCL_NVLS_ENABLE
pass NCCL_CUMEM_ENABLE
pass NCCL_P2P_DISABLE
pass NCCL_SHM_DISABLE
pass NCCL_TOPO_FILE
pass TORCH_NCCL_AVOID_RECORD_STREAMS
pass GLOO_SOCKET_IFNAME
pass UCX_NET_DEVICES
pass JETRL_NNODES
pass JETRL_NODE_RANK
pass JETRL_RDZV_ENDPOINT
pass JETRL_RDZV_PORT

# --- memory and threads ---
# `expandable_segments` conflicts with the engine's sleep mode.
pass PYTORCH_CUDA_ALLOC_CONF
pass PYTORCH_ALLOC_CONF
pass OMP_NUM_THREADS
pass MKL_NUM_THREADS
pass VLLM_CPU_KVCACHE_SPACE
pass VLLM_CPU_OMP_THREADS_BIND

# --- caches: a shared, warm one saves minutes at every start ---
pass HF_HOME
pass TRITON_CACHE_DIR
pass DG_JIT_CACHE_DIR
pass VLLM_CACHE_ROOT
pass TORCHINDUCTOR_CACHE_DIR
pass VLLM_DEEP_GEMM_WARMUP

# --- behaviour ---
# 1: at its end a job writes its newest checkpoint as Hugging Face folders.
pass JETRL_EXPORT
# 1 on nodes without internet: a missing file is then an error at once instead of minutes of retries.
pass HF_HUB_OFFLINE
pass HF_DATASETS_OFFLINE
default VLLM_NO_USAGE_STATS 1
default PYTHONUNBUFFERED 1
default PYTHONFAULTHANDLER 1
default TOKENIZERS_PARALLELISM false

export JETRL_ENV_NAMES
unset -f default pass _jetrl_listed
