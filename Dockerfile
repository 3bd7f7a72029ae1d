# dpmac in a container. Runs are written to the folder mounted at /runs:
#
#   docker build -t dpmac .
#   docker run --rm -v "$PWD:/runs" dpmac train --dataset digits
#
# With CUDA:
#
#   docker build -t dpmac:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#   docker run --rm --gpus all -v "$PWD:/runs" dpmac:cuda train --dataset digits
FROM python:3.13-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
    DPMAC_DATA_DIR=/runs/data DPMAC_CACHE_DIR=/runs/.dpmac-cache HOME=/tmp

RUN pip install torch torchvision --index-url "$TORCH_INDEX"

COPY pyproject.toml README.md LICENSE /src/
COPY dpmac_cli /src/dpmac_cli
RUN pip install /src && rm -r /src

WORKDIR /runs
ENTRYPOINT ["dpmac"]
CMD ["--help"]
