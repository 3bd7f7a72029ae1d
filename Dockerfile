# dpmac in a container. Runs are written to the folder mounted at /runs:
#
#   docker build -t dpmac .
#   docker run --rm -v "$PWD:/runs" dpmac train --dataset digits
#
# On a GPU, add --gpus all to docker run.
FROM python:3.13-slim

ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
    DPMAC_DATA_DIR=/runs/data DPMAC_CACHE_DIR=/runs/.dpmac-cache HOME=/tmp

COPY pyproject.toml README.md LICENSE /src/
COPY dpmac_cli /src/dpmac_cli
RUN pip install /src && rm -r /src

WORKDIR /runs
ENTRYPOINT ["dpmac"]
CMD ["--help"]
