#!/usr/bin/env bash
# The first program to run on a machine with an NVIDIA GPU. It builds fastcl without network, runs the tests that need
# the device, checks small cases with compute-sanitizer, measures, and prints the table last. It takes under 8 minutes.
# Status: it has not run on a GPU yet.
#
#     benchmarks/gpu.sh [FOLDER]      # results: gpu.json, gpu.md and logs (default: benchmarks/results)
#
# Needs nvcc, compute-sanitizer, and a python3 (or $PYTHON) with a CUDA build of torch >= 2.11, setuptools, ninja,
# pybind11, pytest and hypothesis. The exit status tells whether all steps went well; measuring is done in any case.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
folder=${1:-benchmarks/results}
mkdir -p "$folder"
failed=()

step() { # NAME SECONDS COMMAND...: to the log of that name, its end on the screen
  local name=$1 seconds=$2 begin=$SECONDS
  shift 2
  if timeout "$seconds" "$@" >"$folder/gpu-$name.log" 2>&1; then
    echo "$name: ok, $((SECONDS - begin)) s"
  else
    failed+=("$name")
    echo "$name: FAILED (status $?), $((SECONDS - begin)) s"
    tail -n 25 "$folder/gpu-$name.log"
  fi
}

nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader || exit 1
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
export FASTCL_CUDA=1 FASTCL_CUDA_ARCHS=${capability//./} PYTHONPATH=$PWD

step build 120 "$python" -m pip install --quiet --no-build-isolation --no-deps --no-index --editable .
step config 20 "$python" -c 'import fastcl; fastcl.show_config(); assert fastcl.config()["cuda"].startswith("compiled")'
cat "$folder/gpu-config.log"

step tests 90 "$python" -m pytest -q -p no:cacheprovider --durations=5 \
  tests/cuda/test_contrast_cuda.py tests/cuda/test_contrast_gpu.py
tail -n 3 "$folder/gpu-tests.log"

# Every kernel on small cases without torch: all element types, tails, ids, bias, empty rows.
step check-build 90 nvcc -O3 -std=c++17 --expt-relaxed-constexpr -lineinfo -Icsrc -arch=native -x cu \
  tests/cuda/cuda_emulator/check_kernels.cpp csrc/cuda/*.cu -o "$folder/check_kernels"
step check 20 "$folder/check_kernels"
for tool in memcheck racecheck; do
  step "$tool" 45 compute-sanitizer --tool "$tool" --error-exitcode 9 "$folder/check_kernels" 1
done
rm -f "$folder/check_kernels"

left=$((470 - SECONDS)) # of the 8 minutes
timeout "$left" "$python" -m benchmarks.bench_gpu --seconds $((left * 6 / 10)) --output "$folder/gpu" || failed+=(bench)
if ((${#failed[@]})); then
  echo "failed: ${failed[*]}"
  exit 1
fi
