# solrl_jax for Cloud TPUs (v5e, v5p, v6e, TPU7x). From the root of the repository:
#
#     docker build --file scripts/launch/tpu.Dockerfile --tag solrl_jax:tpu .
#     docker run --rm --privileged --network host --volume "$PWD/runs:/data/runs" \
#         solrl_jax:tpu train tiny run.dir=runs/demo
#
# On a TPU VM the container needs `--privileged` for the chips, and `--user root` if only root may open
# `/dev/vfio` or `/dev/accel*` there. Kubernetes grants the chips by `google.com/tpu`. The user is
# `solrl` (1000:1000); a mounted directory must be writable for it.
FROM python:3.12.12-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
RUN python -m venv /opt/solrl
COPY scripts/launch/requirements-tpu.txt ./
RUN /opt/solrl/bin/pip install --no-deps --requirement requirements-tpu.txt
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
ENV PATH=/opt/solrl/bin:$PATH
USER 1000:1000
WORKDIR /data
ENTRYPOINT ["solrl"]
CMD ["--help"]
