#!/usr/bin/env bash
# Makes the environment of one peer of the benchmarks in .bench/NAME: make_env.sh openvino|vllm|transformers|llamacpp.
# PYTHON names the interpreter, which must be one of Python 3.11 to 3.13; pip's own settings and variables hold.
# Everything is pinned in bench/envs/NAME.txt. `make bench-envs` calls it for all.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=$1
folder=.bench/$name
pins=bench/envs/$name.txt
LLAMA_SOURCE=llama_cpp_python==0.3.36

stop() {
    printf 'make: %s: %s\n' "$name" "$*" >&2
    exit 1
}

fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

# The oldest first: builds of torch for the CPU alone are what decides, and older Pythons have more of them.
find_python() {
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    stop "no Python 3.11, 3.12 or 3.13 found. Install one, or name it: make PYTHON=/path/to/python3.11 bench-envs"
}

pip() {
    "$folder/bin/python" -m pip "$@" --quiet --disable-pip-version-check
}

build_llama_server() {
    command -v c++ >/dev/null || command -v g++ >/dev/null || stop 'no C++ compiler. Install one (Debian: apt install g++)'
    export PATH="$PWD/$folder/bin:$PATH"
    rm -rf "$folder/source" "$folder/build"
    # Not in a build environment of its own: the tools are here, and pip only reads the name of what it has fetched.
    pip download --no-deps --no-build-isolation --no-binary llama_cpp_python --dest "$folder/download" "$LLAMA_SOURCE"
    mkdir "$folder/source"
    tar xzf "$folder/download/"llama_cpp_python-*.tar.gz --directory "$folder/source" --strip-components 1
    rm -rf "$folder/download"
    echo "building llama-server: some minutes"
    # For this very machine, and without what a server for one model on this machine does not need.
    cmake -S "$folder/source/vendor/llama.cpp" -B "$folder/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF >"$folder/build.log" ||
        stop "cmake failed, see $folder/build.log"
    cmake --build "$folder/build" --target llama-server >>"$folder/build.log" 2>&1 ||
        stop "the build failed, see $folder/build.log"
    cp "$folder/build/bin/llama-server" "$folder/bin/"
    rm -rf "$folder/build"
}

python=$(find_python)
if ! fits "$folder/bin/python"; then
    "$python" -m venv --clear "$folder" || stop "$python makes no environment (Debian: apt install python3-venv)"
fi
# The CUDA build brings gigabytes that no comparison on a CPU needs, and vLLM's CPU build does not run with it.
[ "$("$folder/bin/python" scripts/torch_build.py "$pins")" = cpu ] ||
    stop 'pip finds no CPU build of torch for this Python. Point pip at an index or folder that has it' \
        '(PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS), or name another Python (PYTHON=...)'
echo "installing into $folder: a minute or more"
pip install --no-compile --no-deps --requirement "$pins"
[ "$name" != llamacpp ] || build_llama_server
