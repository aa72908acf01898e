# The GPU environment for Hopper nodes: the same pins as slurm/install_gpu.sh, which does the work.
#
#   docker build -t jetrl .                   (about 20 minutes; Transformer Engine compiles)
#   docker build -t jetrl --build-arg APEX=--apex .
#   enroot import -o jetrl.sqsh dockerd://jetrl     (for pyxis)
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-cudnn-devel-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive CUDA_HOME=/usr/local/cuda UV_LINK_MODE=copy

# Versions are the distribution's.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates git ninja-build python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir uv==0.13.9
ENV PATH=/opt/jetrl/.venv/bin:/opt/uv/bin:$PATH

WORKDIR /opt/jetrl
COPY . .
ARG APEX=install
RUN slurm/install_gpu.sh "${APEX}" && rm -rf ~/.cache

CMD ["jetrl", "--help"]
