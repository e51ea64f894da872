#!/usr/bin/env bash
# Installs what is missing and runs every test.
#
#   ./tests/run.sh          the standard tier (to end within 60 minutes on 2 cores, from nothing)
#   ./tests/run.sh --k8s    only: the Helm chart on a real Kubernetes of two nodes, built and started here
#   ./tests/run.sh --full   also: sanitizers over everything, 20,000 cases of the sweep, 10,000 simulated
#                           clusters, ten minutes of each fuzz target and of faults of every kind
#
# Closes with one line: N passed, N failed, N skipped.
set -uo pipefail
cd "$(dirname "$0")/.."

tier=standard
case ${1:-} in
  "") ;;
  --full) tier=full ;;
  --k8s) tier=k8s ;;
  *)
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
# shellcheck source=tests/lib/tally.sh
source tests/lib/tally.sh

section "installing what is missing"
./deploy/install_deps.sh clang lld libclang-rt-14-dev python3-pytest prometheus golang-go || fatal "installing failed"
grpcurl=$(./deploy/install_grpcurl.sh) || fatal "grpcurl could not be built"
export RINGATTN_GRPCURL=$grpcurl

if [[ $tier == k8s ]]; then
  section "the Helm chart"
  ./tests/lib/chart_tests.sh || true

  section "Kubernetes"
  ./tests/k8s/run.sh || true
  close_tally
fi

section "sources: format and rules"
./tests/lib/source_checks.sh || true

section "unit tests, sweeps and simulation: bazel test //..."
./tests/lib/unit_tests.sh || true

# What follows waits for most of its time: compilers have the processors then, at the lowest priority.
beside=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$beside"' EXIT
./tests/lib/cuda_compile.sh copy
nice -n 19 ./tests/lib/cuda_compile.sh >"$beside/cuda" 2>&1 &
cuda=$!
nice -n 19 ./tests/lib/chart_tests.sh build >"$beside/helm" 2>&1 &
helm=$!

section "end to end: real processes, grpcurl, Prometheus"
./tests/lib/e2e_tests.sh || true

section "the Python package: wheel, numpy, PyTorch, Hugging Face"
./tests/lib/python_tests.sh || true

section "image and Helm chart"
./tests/lib/image_tests.sh || true
wait "$helm" || cat "$beside/helm"  # built once more below
./tests/lib/chart_tests.sh || true

section "fuzzing"
./tests/lib/fuzz_tests.sh "$tier" || true

section "compiled for GPUs meanwhile"
wait "$cuda"
ended=$?
cat "$beside/cuda"
# 0 and 1 have said what passed and failed.
((ended <= 1)) || record "fail cuda compile: ended before it was through (exit $ended)"
./tests/lib/cuda_compile.sh tests || true

if [[ $tier == full ]]; then
  section "long sweeps, simulation and chaos"
  ./tests/lib/long_tests.sh || true

  section "sanitizers"
  ./tests/lib/sanitizer_tests.sh || true
fi

close_tally
