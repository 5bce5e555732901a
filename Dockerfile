# CPU:  docker build -t eyas --build-arg TORCH_INDEX=URL .     # URL: PyTorch's index of CPU wheels; without it torch brings CUDA
# CUDA: docker build -t eyas --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 .
# Run:  docker run -p 8000:8000 -v ~/.cache/huggingface:/home/eyas/.cache/huggingface eyas MODEL --host 0.0.0.0
ARG BASE=ubuntu:24.04
FROM ${BASE}
ARG TORCH_INDEX=
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 \
    MALLOC_MMAP_THRESHOLD_=2147483647 MALLOC_TRIM_THRESHOLD_=2147483647
# g++ compiles the kernels for the processor that it runs on, at the first start
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 eyas
WORKDIR /opt/eyas
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install torch==2.13.0 ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} \
    && /opt/venv/bin/pip install '.[serve,gguf]'
USER 10001
WORKDIR /home/eyas
EXPOSE 8000
ENTRYPOINT ["/opt/venv/bin/eyas", "serve"]
