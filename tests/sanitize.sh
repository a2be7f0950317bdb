#!/usr/bin/env bash
# The native module under the address and undefined-behaviour sanitizers, with its unit tests.
#
# Usage: tests/sanitize.sh [pytest arguments]. PYTHON names the interpreter (default: .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
build=build/sanitize
PATH=$(realpath -s "$(dirname "$python")"):$PATH  # its cmake, where the machine has none

cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g" \
  -DWORKBENCH_SANITIZE=ON -DPython_EXECUTABLE="$(realpath -s "$python")" \
  -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
cmake --build "$build" --parallel "$(getconf _NPROCESSORS_ONLN)"

# A package that is the source tree but for the native module. An installed workbench must not win over it, so the
# interpreter starts without site, and its packages' directory comes last.
site=$build/site
rm -rf "$site"
mkdir -p "$site/workbench"
for entry in workbench/*; do
  case $entry in *.so | */__pycache__) ;; *) ln -s "$(realpath "$entry")" "$site/workbench/" ;; esac
done
cp "$build"/native/_native*.so "$site/workbench/"

compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt")
case $(uname) in
  Darwin) preload=(DYLD_INSERT_LIBRARIES="$("$compiler" -print-file-name=libclang_rt.asan_osx_dynamic.dylib)") ;;
  # The C++ library too: the sanitizer has to find its throw when it starts, and Python itself brings none.
  *) preload=(LD_PRELOAD="$("$compiler" -print-file-name=libasan.so):$("$compiler" -print-file-name=libstdc++.so)") ;;
esac
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["platlib"])')
exec env "${preload[@]}" ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:strict_init_order=1 UBSAN_OPTIONS=print_stacktrace=1 \
  "$python" -S -c '
import sys
site, packages, *arguments = sys.argv[1:]
sys.path[:0] = [site]
sys.path.append(packages)
import workbench._native
assert workbench._native.__file__.startswith(site), workbench._native.__file__
import pytest
sys.exit(pytest.main(arguments))
' "$(realpath "$site")" "$packages" -q -p no:cacheprovider \
  tests/unit/test_reader.py tests/unit/test_slots.py tests/unit/test_kernels.py tests/unit/test_coactivation.py "$@"
