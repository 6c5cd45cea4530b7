# syntax=docker/dockerfile:1
# Megatron (megatron-core 0.18, TransformerEngine, mbridge) and vLLM 0.24.0. Build from the root of the repository:
#   docker build -f docker/megatron.Dockerfile -t sat-verl:megatron .
# With SGLang instead: --build-arg BASE_IMAGE=verlai/verl:sgl0512.dev4@sha256:... (docker/README.md)
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

# Metadata only, as an import wants a GPU: a tag of the image that lacks one of them fails here and not in a run.
RUN python3 -c "from importlib.metadata import version; \
print(*(f'{name} {version(name)}' for name in ('megatron-core', 'transformer-engine', 'mbridge')))"

COPY pyproject.toml README.md LICENSE ./
COPY sat_verl sat_verl
COPY recipes recipes
COPY eval eval
RUN python3 -m pip install --no-cache-dir --no-deps --editable .

CMD ["python3", "-m", "sat_verl", "doctor"]
