# The executor: weights, KV memory, kernels. The one-shot `model` service runs `octavo` from the same image.
# Built from the root of the project: docker build -f deploy/executor.Dockerfile .
FROM python:3.11-slim-bookworm AS packages

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

# Nothing is compiled ahead but what an import compiles, here and at the end: a service could not keep it, and most
# modules are never imported. torch's own test programs are a tenth of it.
# `auto` takes the CPU build of torch where pip finds one, else torch's own build; `gpu` always takes that. With it comes
# a C compiler: Triton compiles what starts its kernels when the first one runs.
ARG TORCH=auto
COPY constraints-cpu.txt constraints-gpu.txt scripts/torch_build.py ./
RUN build=$TORCH extras=executor \
    && if [ "$build" = auto ]; then build=$(python torch_build.py constraints-cpu.txt); else extras="executor gpu"; fi \
    && echo "torch: the $build build" \
    && python requirements.py $extras >requirements.txt \
    && python -m pip install --root-user-action=ignore --no-cache-dir --no-compile \
        -c "constraints-$build.txt" -r requirements.txt \
    && rm -rf "$(python -c 'import torch; print(torch.__path__[0])')/test" \
    && if [ "$build" = gpu ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi

# The kernels of every instruction set, so that the service needs no compiler. This stage is left behind.
FROM packages AS kernels
RUN apt-get update && apt-get install -y --no-install-recommends g++
COPY octavo octavo
COPY executor_svc executor_svc
RUN python -m executor_svc.kernels.native /kernels

FROM packages
COPY --from=kernels /kernels /usr/local/lib/octavo
COPY README.md LICENSE ./
COPY octavo octavo
COPY executor_svc executor_svc
RUN python -m pip install --root-user-action=ignore --no-cache-dir --no-deps --no-build-isolation . \
    && python -m executor_svc --help >/dev/null

WORKDIR /
USER octavo
ENV OCTAVO_HOME=/var/lib/octavo OCTAVO_KERNELS_DIR=/usr/local/lib/octavo OCTAVO_EXECUTOR_BIND=0.0.0.0
EXPOSE 50053 9103
ENTRYPOINT ["python", "-m", "executor_svc"]
