#!/usr/bin/env bash
# Compiles every CUDA target and the worker with the GPU linked in, so that they cannot rot: for one
# architecture, and the portable kernels for the other one too (their spills are counted), with the toolkit from PyPI wheels (or $CUDA_HOME). Nothing runs on a GPU; the unit
# tests that need a toolkit but no device do run.
#
# The toolkit stands in .cache/cuda, where other builds do not look, and is named to this build alone;
# objects that do not depend on it are shared with the rest. Comes last, since it relinks the worker.
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh

if [[ -n ${CUDA_HOME:-} && -x $CUDA_HOME/bin/nvcc ]]; then
  toolkit=$CUDA_HOME
elif ! toolkit=$(./deploy/install_cuda.sh "$PWD/.cache/cuda"); then
  record "skip cuda compile: the toolkit's wheels cannot be had"
  exit 0
fi
flags=(--noshow_progress --keep_going "--repo_env=CUDA_HOME=$toolkit" --repo_env=RINGATTN_CUDA_ARCHS=90)

begin=$SECONDS
status=0
if "${BAZEL:-bazel}" build "${flags[@]}" --build_tag_filters=cuda //worker/... //tests/gpu/... &&
  "${BAZEL:-bazel}" build "${flags[@]}" //worker:ringattn-worker; then
  record "pass cuda compile ($((SECONDS - begin)) s)"
else
  record "fail cuda compile"
  status=1
fi
begin=$SECONDS
if "${BAZEL:-bazel}" build "${flags[@]}" --repo_env=RINGATTN_CUDA_ARCHS=80 //worker/kernels/cuda/sm80/... \
  //worker/kernels/cuda/simt/...; then
  record "pass cuda compile for sm_80 ($((SECONDS - begin)) s)"
else
  record "fail cuda compile for sm_80"
  status=1
fi
if "${BAZEL:-bazel}" test "${flags[@]}" --local_test_jobs=1 --test_output=errors \
  --test_tag_filters=cuda --build_tests_only //worker/...; then
  record "pass cuda unit tests without a device"
else
  record "fail cuda unit tests without a device"
  status=1
fi
exit "$status"
