# solrl_jax for NVIDIA GPUs with CUDA 13. From the root of the repository:
#
#     docker build --file scripts/launch/cuda.Dockerfile --tag solrl_jax:cuda .
#     docker run --rm --gpus all --ipc host --volume "$PWD/runs:/data/runs" \
#         solrl_jax:cuda train tiny run.dir=runs/demo
#
# CUDA comes from wheels. The host provides the driver (580 or newer) and NVIDIA's container
# toolkit. The user is `solrl` (1000:1000); a mounted directory must be writable for it, or start the
# container with `--user "$(id -u):$(id -g)"`.
FROM python:3.12.12-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
RUN python -m venv /opt/solrl
COPY scripts/launch/requirements-cuda.txt ./
RUN /opt/solrl/bin/pip install --no-deps --requirement requirements-cuda.txt
# The code comes after the large layer, so that a change of it does not build that one again.
COPY pyproject.toml README.md LICENSE ./
COPY solrl_jax ./solrl_jax
RUN pip install hatchling==1.33.0 \
    && pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/solrl/bin/pip install --no-deps /wheels/*.whl

FROM python:3.12.12-slim-bookworm
RUN useradd --uid 1000 --user-group --create-home solrl \
    && install --directory --owner=solrl --group=solrl /data
COPY --from=build /opt/solrl /opt/solrl
# NVIDIA_*: what the container toolkit mounts where no device plug-in decides it. The memory fraction
# is the share of a GPU that `solrl plan` counts on; JAX takes 75 % otherwise.
ENV PATH=/opt/solrl/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.92
USER 1000:1000
WORKDIR /data
ENTRYPOINT ["solrl"]
CMD ["--help"]
