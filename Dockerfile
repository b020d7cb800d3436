# One image for the four services and the one-shot jobs; the command says which it is.
#   docker build -t infinilora .                                                    CPU
#   docker build -t infinilora --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#   TORCH_INDEX="" takes torch from wherever pip is configured to look.
FROM python:3.11-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PYTHONSAFEPATH=1
WORKDIR /src
RUN python -m venv /opt/infinilora
ENV PATH=/opt/infinilora/bin:$PATH
COPY requirements/ requirements/
RUN grep '^torch==' requirements/torch.txt > torch.txt \
    && pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --requirement torch.txt
RUN pip install --require-hashes --requirement requirements/image.txt
COPY pyproject.toml README.md LICENSE ./
COPY libs/ libs/
COPY kernels/ kernels/
COPY services/ services/
COPY tools/ tools/
COPY examples/adapters/ examples/adapters/
RUN pip install --no-deps .
# The native library is compiled here, once, and found by its hash wherever the image runs.
RUN INFINILORA_NATIVE_DIR=/opt/infinilora/native python -m infinilora.kernels.native

FROM python:3.11-slim
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /var/lib/infinilora infinilora \
    && install --directory --owner infinilora --group infinilora /var/lib/infinilora /models /link
COPY --from=build /opt/infinilora /opt/infinilora
ENV PATH=/opt/infinilora/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    INFINILORA_NATIVE_DIR=/opt/infinilora/native \
    INFINILORA_VAR_DIR=/var/lib/infinilora
USER infinilora
WORKDIR /var/lib/infinilora
STOPSIGNAL SIGTERM
CMD ["infinilora", "--help"]
