# One image for all roles: master, worker, engine, report. See docs/scaling.md.
#
#   docker build -t scheduler-bench .
#   docker build -t scheduler-bench --build-arg BASE_IMAGE=python:3.11-slim-bookworm@sha256:... .   # pin by digest
#
# Without a network: put wheels into ./wheels first, and they are used instead of the package index:
#   pip download --only-binary :all: -d wheels -r requirements.lock setuptools wheel
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
WORKDIR /src
RUN python3 -m venv /opt/bench
# The [s] makes the folder optional: COPY wants at least one file, and requirements.lock is there.
COPY requirements.lock wheel[s] /src/wheels/
RUN set -e; \
    if ls wheels/*.whl >/dev/null 2>&1; then from="--no-index --find-links /src/wheels"; else from=""; fi; \
    /opt/bench/bin/pip install --no-cache-dir --disable-pip-version-check $from -r wheels/requirements.lock setuptools wheel
COPY pyproject.toml requirements.txt README.md /app/
COPY bench /app/bench
COPY engine /app/engine
COPY control /app/control
COPY analysis /app/analysis
COPY reports /app/reports
COPY locustfiles /app/locustfiles
COPY shapes /app/shapes
COPY configs /app/configs
COPY deploy/worker.sh /app/deploy/worker.sh
# Editable: Locust takes its files by path from /app, and they import each other from there.
RUN /opt/bench/bin/pip install --no-cache-dir --disable-pip-version-check --no-index --no-deps --no-build-isolation \
        -e /app \
    && /opt/bench/bin/python -m compileall -q /app /opt/bench/lib || true

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="scheduler-bench" \
      org.opencontainers.image.description="A load test for LLM inference services that audits itself"
COPY --from=build /opt/bench /opt/bench
COPY --from=build /app /app
# Numbers, not names: read-only root, no shell user, and Kubernetes' runAsNonRoot can check it.
RUN mkdir -p /runs /shards && chown 10001:10001 /runs /shards
ENV PATH=/opt/bench/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    BENCH_RUNS=/runs \
    BENCH_SHARD_DIR=/shards
USER 10001:10001
WORKDIR /app
ENTRYPOINT ["python", "-m", "bench"]
CMD ["--help"]
