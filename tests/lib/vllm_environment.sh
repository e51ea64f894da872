#!/usr/bin/env bash
# The packages that tests/python/test_vllm.py needs, kept in .cache: 2.6 GB. Prints their folder; exits with 1 and a reason
# if they are not there.
#
#   vllm_environment.sh             looks for them
#   vllm_environment.sh --install   installs them first, if they are missing
set -uo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${RINGATTN_PYTHON:-/usr/bin/python3}
list=tests/python/lib/vllm_packages.txt
folder=$PWD/.cache/vllm-tests/$("$PYTHON" -c 'import sys; print(sys.implementation.cache_tag)')

if ! cmp -s "$list" "$folder/.packages"; then
  if [[ ${1:-} != --install ]]; then
    echo "vLLM's packages (2.6 GB) are not in .cache; the full tier installs them, and so does" \
      "RINGATTN_VLLM_TESTS=full ./tests/lib/python_tests.sh -k test_vllm"
    exit 1
  fi
  free_gib=$(($(df --output=avail -B1 . | tail -1) >> 30))
  ((free_gib >= 8)) || { echo "no room for vLLM's packages: $free_gib GiB of disk are free, 8 are needed"; exit 1; }
  rm -rf "$folder"
  "$PYTHON" -m pip install -q --disable-pip-version-check --no-deps --target "$folder" -r "$list" >&2 &&
    "$PYTHON" tests/python/lib/stub_cuda_libraries.py "$folder" >&2 && cp "$list" "$folder/.packages" ||
    { echo "vLLM's packages could not be installed"; exit 1; }
fi
echo "$folder"
