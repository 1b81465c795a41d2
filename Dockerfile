# pdserve: one image for all roles (router, prefill, decode); the command is the argument.
#   docker build -t pdserve:0.1.0 .
#   docker run --rm pdserve:0.1.0 prefill --help
# Behind a package index of your own: --build-arg PIP_INDEX_URL=...
# CI has no container runtime: it checks this file's parts, not the built image.

FROM python:3.11-slim AS build
ARG PIP_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/pdserve
WORKDIR /src
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY src src
COPY protos protos
COPY core core
COPY engine engine
COPY kernels kernels
COPY kvtransfer kvtransfer
COPY router router
COPY prefill_service prefill_service
COPY decode_service decode_service
COPY client client
COPY cli cli
COPY bench bench
RUN /opt/pdserve/bin/pip install --constraint constraints.txt ".[server]"

FROM python:3.11-slim
RUN useradd --uid 10001 --no-create-home --home-dir /tmp pdserve \
    && install -d -o pdserve -g pdserve /cache
COPY --from=build /opt/pdserve /opt/pdserve
ENV PATH=/opt/pdserve/bin:$PATH PDSERVE_CACHE=/cache HF_HOME=/cache/huggingface PYTHONUNBUFFERED=1
USER 10001:10001
VOLUME /cache
EXPOSE 50051 50061 9090
STOPSIGNAL SIGTERM
ENTRYPOINT ["pdserve"]
CMD ["--help"]
