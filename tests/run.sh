#!/usr/bin/env bash
# Installs what is missing and runs every test.
#
#   ./tests/run.sh          the standard tier
#   ./tests/run.sh --k8s    only: the Helm chart on a real Kubernetes of two nodes, built and started here
#   ./tests/run.sh --full   also: sanitizers over everything, 20,000 cases of the sweep, 10,000 simulated
#                           clusters, sm_80 kernels, ten minutes of each fuzz target and of faults of every kind
#
# Prints the time of each section and the slowest tests. Closes with one line: N passed, N failed, N skipped.
set -uo pipefail
cd "$(dirname "$0")/.."

tier=standard
case ${1:-} in
  "") ;;
  --full) tier=full ;;
  --k8s) tier=k8s ;;
  *)
    sed -n '2,10s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
RINGATTN_SLOWEST=$(mktemp)
export RINGATTN_SLOWEST
# shellcheck source=tests/lib/tally.sh
source tests/lib/tally.sh
RINGATTN_SPEED=$(mktemp)
sample_speed "$RINGATTN_SPEED" &
trap 'kill $(jobs -p) 2>/dev/null' EXIT

section packages "installing missing packages"
./deploy/install_deps.sh clang lld libclang-rt-14-dev python3-pytest prometheus golang-go || fatal "installing failed"
grpcurl=$(./deploy/install_grpcurl.sh) || fatal "grpcurl could not be built"
export RINGATTN_GRPCURL=$grpcurl

if [[ $tier == k8s ]]; then
  section chart "the Helm chart"
  ./tests/lib/chart_tests.sh build || record "fail Helm did not build"
  ./tests/lib/chart_tests.sh || true

  section k8s "Kubernetes"
  ./tests/k8s/run.sh || true
  close_tally
fi

section sources "sources: format, rules and prose"
./tests/lib/source_checks.sh || true

section programs "building the programs"
if ./tests/lib/e2e_tests.sh build; then
  export RINGATTN_PROGRAMS_BUILT=yes
else
  record "fail building the programs"
fi

# End-to-end tests wait for most of their time. Meanwhile one compiler builds the unit tests, which then run.
beside=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; kill -- -"$helm" -"$unit" 2>/dev/null; rm -rf "$beside"' EXIT
# The idle class: Helm compiles only while no other process needs the processor. setsid: one signal ends all compilers.
setsid ./tests/lib/chart_tests.sh build >"$beside/helm" 2>&1 &
helm=$!
chrt --idle --pid 0 "$helm" >/dev/null 2>&1 || true
setsid ./tests/lib/unit_tests.sh early >"$beside/unit" 2>&1 &
unit=$!

section e2e "end to end: real processes, grpcurl, Prometheus"
./tests/lib/e2e_tests.sh || true
# The next section builds and runs the rest with all processors, and reports all.
kill -TERM -- -"$unit" 2>/dev/null
wait "$unit" || true

section unit "unit tests, sweeps, simulation and fuzz corpora: bazel test //..."
./tests/lib/unit_tests.sh || true

./tests/lib/cuda_compile.sh copy
RINGATTN_TALLY=$beside/cuda_tally nice -n 19 ./tests/lib/cuda_compile.sh "$tier" >"$beside/cuda" 2>&1 &
cuda=$!

section python "the Python package: wheel, numpy, PyTorch, Hugging Face"
./tests/lib/python_tests.sh || true

section readme "the README's commands, quick start included"
./tests/lib/readme_tests.py >"$beside/readme" || true
grep -E '^(pass|fail) ' "$beside/readme" >>"$RINGATTN_TALLY" || record "fail README (no report)"

section image "image and Helm chart"
./tests/lib/image_tests.sh || true
# The standard tier waits for Helm at most 300 s. Go keeps what is compiled, so the next run continues.
[[ $tier == full ]] || timeout 300 tail --pid="$helm" -f /dev/null || kill -- -"$helm" 2>/dev/null
wait "$helm"
ended=$?
# The standard tier does not depend on Helm's sources: without it the chart's tests are skipped.
((ended == 0)) || tail -5 "$beside/helm"
[[ $ended == 0 || $tier != full ]] || record "fail Helm did not build (exit $ended)"
./tests/lib/chart_tests.sh || true

section cuda "compiled for GPUs, partly meanwhile"
# During the tests this compile uses one processor. If it has not ended, all processors continue it.
if kill -TERM "$cuda" 2>/dev/null; then
  wait "$cuda"
  RINGATTN_CUDA_JOBS=$(nproc) ./tests/lib/cuda_compile.sh "$tier" || true
else
  wait "$cuda"
  ended=$?
  cat "$beside/cuda"
  cat "$beside/cuda_tally" >>"$RINGATTN_TALLY"
  # With exit status 0 or 1, the script has recorded its results.
  ((ended <= 1)) || record "fail cuda compile: ended early (exit $ended)"
fi
./tests/lib/cuda_compile.sh tests || true

if [[ $tier == full ]]; then
  section fuzz "fuzzing"
  ./tests/lib/fuzz_tests.sh || true

  section long "long sweeps, simulation and chaos"
  ./tests/lib/long_tests.sh || true

  section sanitizers "sanitizers"
  ./tests/lib/sanitizer_tests.sh || true
fi

close_tally
