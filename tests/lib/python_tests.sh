#!/usr/bin/env bash
# The Python package: its wheel is built, installed by pip into an environment made for this run, and tested there
# against real processes. One tally line per case. The tests' other packages (numpy, pytest; PyTorch
# and transformers; JAX) are kept in .cache between runs; without PyTorch or JAX its tests are skipped by name.
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh

PYTHON=${RINGATTN_PYTHON:-/usr/bin/python3}
BASE=(numpy==2.4.6 ml_dtypes==0.6.0 pytest==9.2.0 pytest-xdist==3.8.0 execnet==2.1.2)
# PyTorch of PyPI without its CUDA libraries (5 GB), and what both need, by name.
TORCH=(torch==2.15.0 transformers==5.23.0 nvidia-cuda-runtime==13.5.37)
OF_TORCH=(filelock typing-extensions setuptools sympy networkx jinja2 fsspec huggingface-hub regex tokenizers
  safetensors tqdm pyyaml packaging typer)
# What transformers' Trainer needs. Installed without dependencies, because accelerate's include PyTorch.
TRAINER=(accelerate==1.15.0 psutil==7.2.2)
# JAX for CPUs and what it needs apart from BASE, by name: numpy must stay BASE's.
JAX=(jax==0.10.2 jaxlib==0.10.2 opt_einsum==3.4.0 scipy==1.17.1)

./deploy/install_deps.sh python3-dev pybind11-dev python3-venv python3-pip binutils patchelf
${BAZEL:-bazel} build --noshow_progress //server:ringattn-server //worker:ringattn-worker //client:ringattn ||
  { record "fail python: build"; exit 1; }
# A GPU worker on fakes, for tests of tensors on a GPU; they are skipped by name without a toolkit.
if [[ -n ${CUDA_HOME:-} || -d .deps/cuda || -d /usr/local/cuda ]]; then
  ${BAZEL:-bazel} build --noshow_progress //tests/cuda_memory:fake_gpu_service //worker/testing/fake_cuda:libcuda.so.1 ||
    record "fail python: build of the fake GPU service"
fi
export PIP_ROOT_USER_ACTION=ignore  # every package goes into a separate folder
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wheel=$(./deploy/wheel.sh --python="$PYTHON" --output="$work" | tail -1) && [[ -f $wheel ]] ||
  { record "fail python: deploy/wheel.sh"; exit 1; }

cache=$PWD/.cache/python-tests/$("$PYTHON" -c 'import sys; print(sys.implementation.cache_tag)')
# folder, packages...: whether the folder has these very packages
has() {
  local folder=$cache/$1
  shift
  [[ -f $folder/.packages && $(<"$folder/.packages") == "$*" ]]
}
# folder, packages...: fills the folder unless it has these very packages; DEPS= are pip's options
keep() {
  has "$@" && return
  local folder=$cache/$1
  shift
  rm -rf "$folder"
  # shellcheck disable=SC2086  # several options
  "$PYTHON" -m pip install -q --disable-pip-version-check --target "$folder" ${DEPS:-} "$@" || return 1
}
kept() {
  local folder=$cache/$1
  shift
  echo "$*" >"$folder/.packages"
}

keep base "${BASE[@]}" && kept base "${BASE[@]}" || { record "fail python: ${BASE[*]} could not be installed"; exit 1; }
export RINGATTN_NO_TORCH=
torch() {
  has torch "${TORCH[@]}" && has of_torch "${OF_TORCH[@]}" && has trainer "${TRAINER[@]}" && return
  local free_gib=$(($(df --output=avail -B1 . | tail -1) >> 30))
  ((free_gib >= 6)) || { echo "less than 6 GiB of disk are free"; return 1; }
  DEPS=--no-deps keep torch "${TORCH[@]}" >&2 && keep of_torch "${OF_TORCH[@]}" >&2 &&
    DEPS=--no-deps keep trainer "${TRAINER[@]}" >&2 && kept trainer "${TRAINER[@]}" &&
    "$PYTHON" tests/python/lib/stub_cuda_libraries.py "$cache/torch" >&2 &&
    kept of_torch "${OF_TORCH[@]}" && kept torch "${TORCH[@]}" && return
  echo "${TORCH[*]} could not be installed"
  return 1
}
why=$(torch) || export RINGATTN_NO_TORCH=$why
export RINGATTN_NO_JAX=
has jax "${JAX[@]}" || { DEPS=--no-deps keep jax "${JAX[@]}" && kept jax "${JAX[@]}"; } ||
  export RINGATTN_NO_JAX="${JAX[*]} could not be installed"

"$PYTHON" -m venv "$work/venv" || { record "fail python: venv"; exit 1; }
site=$("$work/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')
packages=("$cache/base")
[[ -n $RINGATTN_NO_TORCH ]] || packages+=("$cache/torch" "$cache/of_torch" "$cache/trainer")
[[ -n $RINGATTN_NO_JAX ]] || packages+=("$cache/jax")
printf '%s\n' "${packages[@]}" >"$site/kept.pth"
"$work/venv/bin/python" -m pip install -q --disable-pip-version-check --no-index "$wheel" ||
  { record "fail python: pip install $(basename "$wheel")"; exit 1; }

# vLLM needs other versions, so it has an environment of its own. The full tier installs its packages.
install=
[[ ${RINGATTN_VLLM_TESTS:-} != full ]] || install=--install
export RINGATTN_NO_VLLM= RINGATTN_VLLM_PYTHON=
# shellcheck disable=SC2086  # an option or nothing
if why=$(./tests/lib/vllm_environment.sh $install); then
  "$PYTHON" -m venv "$work/vllm" && site=$("$work/vllm/bin/python" -c 'import site; print(site.getsitepackages()[0])') &&
    echo "$why" >"$site/kept.pth" &&
    "$work/vllm/bin/python" -m pip install -q --disable-pip-version-check --no-index --no-deps "$wheel" ||
    { record "fail python: environment of vLLM"; exit 1; }
  RINGATTN_VLLM_PYTHON=$work/vllm/bin/python
else
  RINGATTN_NO_VLLM=$why
fi

PYTHONDONTWRITEBYTECODE=1 "$work/venv/bin/python" -m pytest -q -p no:cacheprovider --durations=8 \
  -n 2 --dist loadfile --junit-xml="$work/report.xml" tests/python "$@"
status=$?
/usr/bin/python3 tests/lib/tally_junit.py python "$work/report.xml" >>"$RINGATTN_TALLY" ||
  record "fail python suite (no report)"
((status == 0)) || record "fail python suite (pytest exit $status)"
exit "$status"
