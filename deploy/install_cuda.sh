#!/usr/bin/env bash
# Prints the path of a CUDA toolkit (a folder with bin/nvcc, include/, lib*/libcudart_static.a).
# Takes, in this order: $CUDA_HOME, /usr/local/cuda, the private environment .deps/cuda, which is
# filled from PyPI wheels on first use (about 480 MB). Needs no root and no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

for candidate in "${CUDA_HOME:-}" /usr/local/cuda; do
  if [[ -n $candidate && -x $candidate/bin/nvcc ]]; then
    echo "$candidate"
    exit 0
  fi
done

# CUDA 13.0 runs on drivers from 580 on; a newer toolkit would need a newer driver.
WHEELS=(
  nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-nccl-cu13==2.28.9
)
environment=$PWD/.deps/cuda
stamp=$environment/.version
if [[ ! -f $stamp ]] || [[ $(<"$stamp") != "${WHEELS[*]}" ]]; then
  rm -rf "$environment"
  python3 -m venv "$environment" >&2
  "$environment/bin/pip" install -q --disable-pip-version-check --no-deps "${WHEELS[@]}" >&2
  echo "${WHEELS[*]}" >"$stamp"
fi
toolkit=$(echo "$environment"/lib/python3*/site-packages/nvidia/cu13)
[[ -x $toolkit/bin/nvcc ]] || { echo "install_cuda.sh: no nvcc in $toolkit" >&2; exit 1; }
echo "$toolkit"
