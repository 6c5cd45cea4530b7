# syntax=docker/dockerfile:1
# FSDP2 and vLLM 0.24.0 (torch 2.11.0, CUDA 13.0), for backend=cuda. Build from the root of the repository:
#   docker build -f docker/vllm.Dockerfile -t sat-verl:vllm .
ARG BASE_IMAGE=verlai/verl:vllm024.dev2@sha256:b867883b0dd011363e69ab2ab344922a28c5bd0409e2a324e3ee70fb27ca7543
FROM ${BASE_IMAGE}

# Recorded, so that an image says what it was made from.
ARG BASE_IMAGE
LABEL org.opencontainers.image.base.name="${BASE_IMAGE}"

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /opt/sat-verl

# pip may add to the image, and must not move what it was built around: torch, engines, kernels.
COPY docker/requirements.txt docker/requirements.txt
RUN python3 -m pip freeze \
    | grep -iE '^(torch|torchvision|torchaudio|vllm|sglang|sglang-kernel|flash-attn|flash_attn|nvidia-[a-z0-9-]+)==' \
    > /tmp/constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/constraints.txt -r docker/requirements.txt \
    && python3 -m pip install --no-cache-dir --no-deps sgl-eval==0.1.3

COPY pyproject.toml README.md LICENSE ./
COPY sat_verl sat_verl
COPY recipes recipes
COPY eval eval
RUN python3 -m pip install --no-cache-dir --no-deps --editable .

CMD ["python3", "-m", "sat_verl", "doctor"]
