# The scheduler: queue, batches, the ledger of every executor. No torch, no model.
# Built from the root of the project: docker build -f deploy/scheduler.Dockerfile .
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

COPY README.md LICENSE ./
COPY octavo octavo
COPY scheduler_svc scheduler_svc
# What an import compiles is kept in the image: a service could not keep it.
RUN python -m pip install --root-user-action=ignore --no-cache-dir --no-deps --no-build-isolation . \
    && python -m scheduler_svc --help >/dev/null

WORKDIR /
USER octavo
ENV OCTAVO_HOME=/var/lib/octavo OCTAVO_SCHEDULER_BIND=0.0.0.0
EXPOSE 50052 9102
ENTRYPOINT ["python", "-m", "scheduler_svc"]
