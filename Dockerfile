# fastgpt with its pinned dependencies: docker build --tag fastgpt .
# --target cuda for NVIDIA's GPUs; docs/deployment.md says more.
FROM debian:bookworm-slim AS python
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 fastgpt
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /home/fastgpt
CMD ["fastgpt-train", "--help"]

FROM python AS packages
WORKDIR /src
# pip reads this one itself; the index of PyTorch's CPU builds makes the image 4 GB smaller
ARG PIP_EXTRA_INDEX_URL
# the dependencies come first, so that a changed source file does not install them again;
# without Triton, of 0.7 GB, which CUDA's builds of PyTorch bring and others do not use
COPY pyproject.toml constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv /opt/venv \
    && python -c "import tomllib; found = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        print(*(x for x in found['dependencies'] if 'triton' not in x), sep='\n')" > needed.txt \
    && pip install --constraint constraints.txt --requirement needed.txt
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps .

FROM python AS cuda
# Triton compiles a launcher for each kernel
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=packages /opt/venv /opt/venv
USER 1000

FROM python AS cpu
COPY --from=packages /opt/venv /opt/venv
USER 1000
