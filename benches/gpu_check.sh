#!/usr/bin/env bash
# Checks of the device "cuda" on a machine with a card, in one call of under eight minutes.
#
#   benches/gpu_check.sh pack                  here: the wheel and stripped test programs, into build/gpu-check
#   benches/gpu_check.sh [WORKLOAD ...]        on a machine with a card: all suites, the Python tests of devices, then
#                                              steps beside PyTorch's; the table comes last
#   benches/gpu_check.sh --software [WORKLOAD ...]   the same on the software driver, with two steps of each workload;
#                                              without names, of those that take seconds there
#
# The machine needs this tree with build/gpu-check, Python with NumPy, onnx and pytest, and NVIDIA's NVRTC and cuBLASLt,
# which come with PyTorch. Environment variables: PYTHON (python3) runs everything; OUT (benches/results) receives the
# logs and the numbers as JSON.
set -uo pipefail
cd "$(dirname "$0")/.."
ROOT=$PWD
PACKED=$ROOT/build/gpu-check
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$ROOT/benches/results}

pack() {
  set -e
  make build/release.stamp
  rm -rf "$PACKED"
  mkdir -p "$PACKED"
  cp build/wheels/*.whl "$PACKED"
  echo "$ROOT" >"$PACKED/root"
  for test in suites gpu; do
    program=$(cargo test --no-run --quiet -p ortrain-cuda --test $test --message-format json \
      | "$PYTHON" -c 'import json, sys; print([m["executable"] for m in map(json.loads, sys.stdin) if m.get("executable")][-1])')
    strip -o "$PACKED/$test" "$program"
    gzip --force "$PACKED/$test"
  done
  du -sh "$PACKED"
}

failed=()
# Runs a part with a time limit in seconds. Its output is the file NAME.txt; only its end is shown.
part() {
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  if timeout "$limit" "$@" >"$OUT/gpu-$name.txt" 2>&1; then
    echo "$name: $((SECONDS - start)) s"
  else
    echo "$name: failed with status $? after $((SECONDS - start)) s"
    failed+=("$name")
  fi
  tail -n 4 "$OUT/gpu-$name.txt" | cut -c 1-300
}

if [ "${1:-}" = pack ]; then
  pack
  exit
fi
steps=(--device cuda --seconds 3)
limit=300
if [ "${1:-}" = --software ]; then
  shift
  export ORTRAIN_CUDA_LIBRARIES=$ROOT/build/cuda ORTRAIN_CUDA_CACHE= SOFTWARE_NVRTC_CACHE=$ROOT/build/cuda/modules
  steps=(--device cuda --steps 2 --side 128 --elements 65536 --peer none --no-optimizer)
  limit=3600
  [ $# -gt 0 ] || set -- mlp lenet
else
  "$PYTHON" -c 'import ctypes; ctypes.CDLL("libvulkan.so.1")' 2>/dev/null && steps+=(--device vulkan)
fi
[ -e "$PACKED/root" ] || { echo "build/gpu-check is missing: benches/gpu_check.sh pack makes it" >&2; exit 1; }
mkdir -p "$OUT"
# The test programs read files of the tree by its path on the machine that compiled them.
packed_root=$(cat "$PACKED/root")
[ -e "$packed_root" ] || { mkdir -p "$(dirname "$packed_root")" && ln -s "$ROOT" "$packed_root"; }
for test in suites gpu; do
  [ -x "$PACKED/$test" ] || { gunzip --keep --force "$PACKED/$test.gz" && chmod +x "$PACKED/$test"; }
done
"$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$PACKED/site" "$PACKED"/*.whl || exit 1
export PYTHONPATH=$PACKED/site ORTRAIN_TEST_DEVICE=cuda PYTHONUNBUFFERED=1
# The Rust tests find NVRTC and cuBLASLt beside the packages of this Python.
VIRTUAL_ENV=$("$PYTHON" -c 'import sys; print(sys.prefix)')
export VIRTUAL_ENV

part suites $limit bash -c "cd crates/ortrain-cuda && '$PACKED/suites'"
part backend $limit bash -c "cd crates/ortrain-cuda && '$PACKED/gpu'"
part python $limit "$PYTHON" -m pytest -q -p no:cacheprovider tests/test_devices.py tests/test_replay.py tests/test_buffers.py
if [ -z "${ORTRAIN_CUDA_LIBRARIES:-}" ] && command -v compute-sanitizer >/dev/null; then
  part sanitizer 60 bash -c "cd crates/ortrain-cuda && compute-sanitizer --error-exitcode 1 '$PACKED/suites' --exact \
    planned_programs_with_updates_and_segments"
fi
part steps $limit "$PYTHON" benches/gpu_steps.py "${steps[@]}" --json "$OUT/gpu-steps.json" "$@"
cat "$OUT/gpu-steps.txt"
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}; the logs are $OUT/gpu-NAME.txt" >&2
  exit 1
fi
