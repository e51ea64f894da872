#!/usr/bin/env bash
# Compiles every CUDA target and the worker with GPU support, so that they keep compiling: for sm_90, and in the
# full tier the portable kernels for sm_80 too (their register spills are counted). The toolkit comes from PyPI
# wheels or $CUDA_HOME. Nothing runs on a GPU, except unit tests that need a toolkit but no device.
#
# It builds in a copy of the build of everything else, $RINGATTN_CUDA_BUILD (.cache/cuda-build): objects that do
# not depend on the toolkit are not compiled again, and bazel-bin keeps the worker that other tests start at the
# same time. A copy of an older commit's build is brought up to date, one file at a time. The toolkit is in
# .cache/cuda, where other builds do not look.
#
#   cuda_compile.sh copy             copies the other build; no other Bazel may run
#   cuda_compile.sh standard|full    compiles, with $RINGATTN_CUDA_JOBS compilers at a time [1]
#   cuda_compile.sh tests            runs those unit tests and ends the copy's Bazel
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh

part=${1:-standard}
case $part in
  copy | standard | full | tests) ;;
  *)
    sed -n '2,14s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac

if [[ -n ${CUDA_HOME:-} && -x $CUDA_HOME/bin/nvcc ]]; then
  toolkit=$CUDA_HOME
elif ! toolkit=$(./deploy/install_cuda.sh "$PWD/.cache/cuda"); then
  [[ $part != standard && $part != full ]] || record "skip cuda compile: the toolkit's wheels cannot be had"
  exit 0
fi
build=${RINGATTN_CUDA_BUILD:-$PWD/.cache/cuda-build}
# An interrupted run leaves a Bazel server, which exits after this idle time.
startup=("--output_base=$build" --max_idle_secs=900)
flags=(--noshow_progress --keep_going "--repo_env=CUDA_HOME=$toolkit" --repo_env=RINGATTN_CUDA_ARCHS=90
  --experimental_convenience_symlinks=ignore)
# Runs Bazel in the background and waits, so that signals are handled meanwhile.
cuda_bazel() {
  "${BAZEL:-bazel}" "${startup[@]}" "$1" "${flags[@]}" "${@:2}" &
  wait "$!"
}
trap 'kill $(jobs -p) 2>/dev/null; exit 143' INT TERM

if [[ $part == tests ]]; then
  status=0
  if cuda_bazel test --local_test_jobs=1 --test_output=errors --test_tag_filters=cuda --build_tests_only \
    //worker/...; then
    record "pass cuda unit tests without a device"
  else
    record "fail cuda unit tests without a device"
    status=1
  fi
  "${BAZEL:-bazel}" "${startup[@]}" shutdown
  exit "$status"
fi

# Under another name until it is whole: of half a build Bazel would believe what stands there.
copy_build() {
  local others
  rm -rf "$build.part" && mkdir -p "$build.part" && others=$("${BAZEL:-bazel}" info output_base 2>/dev/null) &&
    find "$others" -mindepth 1 -maxdepth 1 ! -name server -exec cp -a --reflink=auto -t "$build.part" {} + &&
    mv "$build.part" "$build"
}
if [[ ! -d $build ]] && ! copy_build; then
  rm -rf "$build.part"
  [[ $part == copy ]] || record "fail cuda compile: no copy of the build"
  exit 1
fi
[[ $part == copy ]] && exit
# One compiler at a time leaves a processor to tests that run concurrently.
jobs=${RINGATTN_CUDA_JOBS:-1}
status=0
begin=$SECONDS
if [[ $part != full ]]; then
  record "skip cuda compile for sm_80: the full tier compiles it"
elif cuda_bazel build --jobs="$jobs" --repo_env=RINGATTN_CUDA_ARCHS=80 //worker/kernels/cuda/sm80/... \
  //worker/kernels/cuda/simt/...; then
  record "pass cuda compile for sm_80 ($((SECONDS - begin)) s)"
else
  record "fail cuda compile for sm_80"
  status=1
fi
begin=$SECONDS
if cuda_bazel build --jobs="$jobs" --build_tag_filters=cuda //worker/... //tests/gpu/... &&
  cuda_bazel build --jobs="$jobs" //worker:ringattn-worker; then
  record "pass cuda compile ($((SECONDS - begin)) s)"
else
  record "fail cuda compile"
  status=1
fi
exit "$status"
