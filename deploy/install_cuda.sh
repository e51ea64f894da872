#!/usr/bin/env bash
# Prints the path of a CUDA toolkit (a folder with bin/nvcc, include/, lib*/libcudart_static.a) with
# which NCCL's header can be found too.
# Takes, in this order: $CUDA_HOME, /usr/local/cuda, a private environment, which is filled from
# PyPI wheels on first use (about 480 MB). Needs no root and no GPU.
#
#   ./deploy/install_cuda.sh            the private environment is .deps/cuda, where builds find it
#   ./deploy/install_cuda.sh FOLDER     it is FOLDER, and no installed toolkit is looked for: only
#                                       builds with CUDA_HOME set to what this prints use it
set -euo pipefail
cd "$(dirname "$0")/.."

environment=${1:-}
if [[ -z $environment ]]; then
  environment=$PWD/.deps/cuda
  for candidate in "${CUDA_HOME:-}" /usr/local/cuda; do
    [[ -n $candidate && -x $candidate/bin/nvcc ]] || continue
    if [[ -f $candidate/include/nccl.h || -f $candidate/../nccl/include/nccl.h ||
      -f /usr/include/nccl.h ]]; then
      echo "$candidate"
      exit 0
    fi
  done
fi

# CUDA 13.0 runs on drivers from 580 on; a newer toolkit would need a newer driver.
WHEELS=(
  nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-nccl-cu13==2.28.9
)
stamp=$environment/.version
if [[ ! -f $stamp ]] || [[ $(<"$stamp") != "${WHEELS[*]}" ]]; then
  # Replaces only installations of this script: a folder without its stamp has another owner, or is an
  # installation in progress.
  if [[ -n ${1:-} && -e $environment && ! -f $stamp ]]; then
    echo "install_cuda.sh: $environment exists and was not made by this script; remove it first" >&2
    exit 1
  fi
  mkdir -p "$(dirname "$environment")"
  staging=$(mktemp -d "$environment.XXXXXX")
  trap 'rm -rf "$staging"' EXIT
  python3 -m venv "$staging" >&2
  "$staging/bin/pip" install -q --disable-pip-version-check --no-deps "${WHEELS[@]}" >&2
  echo "${WHEELS[*]}" >"$staging/.version"
  rm -rf "$environment"
  mv -T "$staging" "$environment"
fi
# .bazelrc imports it: a Bazel that runs already has looked for a toolkit and found none.
[[ -n ${1:-} ]] || echo "common --repo_env=RINGATTN_CUDA_INSTALLED=$(cksum <"$stamp" | cut -d' ' -f1)" >.deps/cuda.bazelrc
toolkit=$(echo "$(realpath "$environment")"/lib/python3*/site-packages/nvidia/cu13)
[[ -x $toolkit/bin/nvcc ]] || { echo "install_cuda.sh: no nvcc in $toolkit" >&2; exit 1; }
echo "$toolkit"
