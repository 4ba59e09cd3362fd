# An image that runs ashl: `docker build -t ashl . && docker run --rm ashl train runtime=sim`.
# By default torch is the CPU build. For CUDA give the index of its wheels (not run by us):
#   docker build -t ashl-cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
#   docker run --rm --gpus all ashl-cuda train runtime.device=cuda
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

WORKDIR /opt/ashl
COPY pyproject.toml README.md LICENSE ./
COPY ashl ashl
COPY cli cli
COPY conf conf
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" torch torchvision \
    && pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" .

# Runs are written to /work/runs; mount a folder there to keep them.
RUN useradd --create-home ashl && mkdir /work && chown ashl /work
USER ashl
WORKDIR /work
ENTRYPOINT ["ashl"]
CMD ["doctor"]
