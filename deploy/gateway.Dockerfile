# The gateway: the public API, text to tokens and back. No torch; of a model it reads what `octavo prepare` wrote.
# Built from the root of the project: docker build -f deploy/gateway.Dockerfile .
FROM python:3.11-slim-bookworm

# pip's own variables. Not given, they leave what the base image or its pip.conf says.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS

# The same user in every image: they share a volume.
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/octavo --create-home octavo

# Down to here and through the next two steps the three files are alike, and the engine makes these layers once.
WORKDIR /src
COPY pyproject.toml constraints-common.txt deploy/requirements.py ./
RUN python requirements.py >requirements.txt \
    && python -m pip install --root-user-action=ignore --no-cache-dir --no-compile \
        -c constraints-common.txt -r requirements.txt setuptools

# Nothing is compiled ahead but what an import compiles: a service could not keep it, and most modules are never
# imported.
RUN python requirements.py gateway >requirements.txt \
    && python -m pip install --root-user-action=ignore --no-cache-dir --no-compile \
        -c constraints-common.txt -r requirements.txt \
    && python -c 'import tokenizers, transformers.utils.chat_template_utils'

COPY README.md LICENSE ./
COPY octavo octavo
COPY gateway gateway
RUN python -m pip install --root-user-action=ignore --no-cache-dir --no-deps --no-build-isolation . \
    && python -m gateway --help >/dev/null

WORKDIR /
USER octavo
ENV OCTAVO_HOME=/var/lib/octavo OCTAVO_GATEWAY_BIND=0.0.0.0
EXPOSE 50051 50054 8000 9101
ENTRYPOINT ["python", "-m", "gateway"]
