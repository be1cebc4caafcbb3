#!/usr/bin/env bash
# Makes or updates the environment that everything runs in: make_env.sh FOLDER. `make` calls it.
# PYTHON names the interpreter to build on, CXX the C++ compiler; pip's own settings and variables hold.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1

stop() {
    printf 'make: %s\n' "$*" >&2
    exit 1
}

fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" || stop "PYTHON=$PYTHON is no Python 3.11, 3.12 or 3.13 that runs."
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    stop "no Python 3.11, 3.12 or 3.13 found. Install one, or name it: make PYTHON=/path/to/python3.12"
}

check_compiler() {
    for candidate in "${CXX:-c++}" g++ clang++; do
        if echo 'int main() { return 0; }' | "$candidate" -x c++ -o /dev/null - 2>/dev/null; then
            return
        fi
    done
    stop "no C++ compiler that works. Install one (Debian: apt install g++), or name it: make CXX=/path/to/c++"
}

python=$(find_python)
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    stop "$python has no venv module. Install it (Debian: apt install python3-venv), or name another Python: make PYTHON=..."
check_compiler

if ! fits "$folder/bin/python"; then
    echo "making $folder with $("$python" --version)"
    "$python" -m venv --clear "$folder"
fi

# The CPU build of torch where pip finds one, since the other brings a CUDA runtime of several gigabytes.
build=$("$folder/bin/python" scripts/torch_build.py constraints-cpu.txt)
if [ "$build" = gpu ]; then
    echo 'pip finds no CPU build of torch for this Python: the CUDA build comes instead, about 3 GB to fetch and 7 GB on disk.'
    echo 'To avoid that, point pip at an index or folder that has it (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) and repeat.'
fi
# What pip says of each of seventy packages hides what it says when something fails; a download of gigabytes is watched.
quiet=-qq
[ "$build" = cpu ] || quiet=
echo "installing into $folder: a minute or two"
# compat: a path that is searched, so that a folder named octavo beside a user's script does not hide the package.
# Not compiled ahead: most modules of torch are never imported, and Python compiles the others at their first import.
"$folder/bin/python" -m pip install $quiet --disable-pip-version-check --no-compile --constraint "constraints-$build.txt" \
    --config-settings editable_mode=compat --editable '.[gateway,executor,gpu,bench,dev]'
echo "$folder is ready: octavo with its services, and what tests and checks need. Next:"
echo "  source $folder/bin/activate"
