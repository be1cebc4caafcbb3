#!/usr/bin/env bash
# Runs a command with kernels that AddressSanitizer watches: scripts/sanitize.sh COMMAND...
# An access outside of an array, torch's included, ends the command with a report. The libraries are built once, with g++,
# in .bench/sanitize, apart from those of every day. What other libraries leak or do among themselves is not looked at.
set -euo pipefail
home=$PWD/.bench/sanitize
mkdir -p "$home"
cat >"$home/cxx" <<'END'
#!/bin/sh
exec g++ -fsanitize=address -fno-omit-frame-pointer -g1 "$@"
END
chmod +x "$home/cxx"
export CXX=$home/cxx OCTAVO_HOME=$home
# Python was not built with it, so it is loaded first, and with it the library whose exceptions it takes over.
LD_PRELOAD=$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libstdc++.so)
export LD_PRELOAD
export ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0
exec "$@"
