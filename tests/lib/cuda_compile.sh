#!/usr/bin/env bash
# Compiles every CUDA target and the worker with the GPU linked in, so that they cannot rot: for one
# architecture, and the portable kernels for the other one too (their spills are counted), with the toolkit
# from PyPI wheels (or $CUDA_HOME). Nothing runs on a GPU; the unit tests that need a toolkit but no device do.
#
#   cuda_compile.sh copy    copies the other build, while no other Bazel runs; else the next does
#   cuda_compile.sh         compiles
#   cuda_compile.sh tests   runs those unit tests
#
# In a copy of the build of everything else, $RINGATTN_CUDA_BUILD (.cache/cuda-build): what does not depend
# on the toolkit is not compiled again, and bazel-bin's worker stays what other tests, at the same time,
# start. The toolkit stands in .cache/cuda, where other builds do not look.
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh

if [[ -n ${CUDA_HOME:-} && -x $CUDA_HOME/bin/nvcc ]]; then
  toolkit=$CUDA_HOME
elif ! toolkit=$(./deploy/install_cuda.sh "$PWD/.cache/cuda"); then
  [[ ${1:-} == tests ]] || record "skip cuda compile: the toolkit's wheels cannot be had"
  exit 0
fi
build=${RINGATTN_CUDA_BUILD:-$PWD/.cache/cuda-build}
flags=(--noshow_progress --keep_going "--repo_env=CUDA_HOME=$toolkit" --repo_env=RINGATTN_CUDA_ARCHS=90
  --experimental_convenience_symlinks=ignore)
cuda_bazel() { bazel "--output_base=$build" "$1" "${flags[@]}" "${@:2}"; }

if [[ ${1:-} == tests ]]; then
  status=0
  if cuda_bazel test --local_test_jobs=1 --test_output=errors --test_tag_filters=cuda --build_tests_only \
    //worker/...; then
    record "pass cuda unit tests without a device"
  else
    record "fail cuda unit tests without a device"
    status=1
  fi
  bazel "--output_base=$build" shutdown
  exit "$status"
fi

if [[ ! -d $build ]]; then
  mkdir -p "$build"
  others=$(bazel info output_base 2>/dev/null) &&
    find "$others" -mindepth 1 -maxdepth 1 ! -name server -exec cp -a --reflink=auto -t "$build" {} + ||
    { rm -rf "$build" && record "fail cuda compile: no copy of the build" && exit 1; }
fi
[[ ${1:-} == copy ]] && exit
# One compiler at a time leaves a processor to the tests that run beside it.
status=0
begin=$SECONDS
if cuda_bazel build --jobs=1 --repo_env=RINGATTN_CUDA_ARCHS=80 //worker/kernels/cuda/sm80/... //worker/kernels/cuda/simt/...; then
  record "pass cuda compile for sm_80 ($((SECONDS - begin)) s)"
else
  record "fail cuda compile for sm_80"
  status=1
fi
begin=$SECONDS
if cuda_bazel build --jobs=1 --build_tag_filters=cuda //worker/... //tests/gpu/... &&
  cuda_bazel build --jobs=1 //worker:ringattn-worker; then
  record "pass cuda compile ($((SECONDS - begin)) s)"
else
  record "fail cuda compile"
  status=1
fi
exit "$status"
