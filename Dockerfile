# One image for every role: SuperLink, SuperNode and whoever submits a run. See deploy/README.md.
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /app

# The CPU build of the pinned torch first: it is the larger part, and changes less often than the code.
COPY constraints.txt ./
RUN pip install --index-url "$TORCH_INDEX" $(grep -E '^(torch|torchvision)==' constraints.txt)

COPY pyproject.toml README.md LICENSE ./
COPY fedsim ./fedsim
COPY strategies ./strategies
COPY clients ./clients
COPY adversaries ./adversaries
RUN pip install --constraint constraints.txt '.[federation]' \
  && useradd --create-home --uid 1000 fedsim \
  && install -d -o fedsim -g fedsim /runs /state /data /home/fedsim/.flwr \
  && rm -rf fedsim strategies clients adversaries build ./*.egg-info

COPY examples/quickstart.toml ./examples/quickstart.toml
COPY deploy/register-supernodes.sh ./deploy/register-supernodes.sh
COPY --chown=fedsim:fedsim deploy/connections.toml /home/fedsim/.flwr/config.toml

ENV FLWR_HOME=/home/fedsim/.flwr \
  FLWR_TELEMETRY_ENABLED=0 \
  FLWR_DISABLE_UPDATE_CHECK=1 \
  FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
  FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.5 \
  OMP_NUM_THREADS=1 \
  FEDSIM_DATA=/data

USER fedsim
EXPOSE 8000
CMD ["fedsim", "--help"]
