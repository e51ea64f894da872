#!/usr/bin/env bash
# Installs what building and running ringattn needs on Debian 12 or Ubuntu 24.04.
# Quiet and quick when everything is there. Needs root (or sudo) only to install.
set -euo pipefail
cd "$(dirname "$0")/.."

PACKAGES=(
  ca-certificates curl git g++ python3 python3-dev python3-pip python3-venv pybind11-dev unzip
  bazel-bootstrap bazel-rules-java bazel-rules-proto bazel-skylib bazel-platforms
  libgrpc++-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev
  libabsl-dev libgtest-dev libgmock-dev libbenchmark-dev prometheus-cpp-dev libcivetweb-dev zlib1g-dev
  libgloo-dev libhwy-dev libisal-dev libspdlog-dev nlohmann-json3-dev libcli11-dev libssl-dev libcurl4-openssl-dev
)
# google/rpc protos: no distribution package carries them.
GOOGLEAPIS_VERSION=1.63.2

missing=()
for package in "${PACKAGES[@]}" "$@"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$' ||
    missing+=("$package")
done
if ((${#missing[@]})); then
  as_root=()
  ((EUID == 0)) || as_root=(sudo)
  echo "installing: ${missing[*]}" >&2
  "${as_root[@]}" apt-get update -qq
  # Packages reach the disk by one sync at the end; one for each file takes as long as all the rest.
  DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends \
    -o Dpkg::Options::=--force-unsafe-io "${missing[@]}" >/dev/null
  sync
fi

if [[ ! -f .deps/googleapis/.version ]] || [[ $(<.deps/googleapis/.version) != "$GOOGLEAPIS_VERSION" ]]; then
  rm -rf .deps/googleapis
  mkdir -p .deps/googleapis .deps/download
  python3 -m pip download -q --no-deps --disable-pip-version-check -d .deps/download \
    "googleapis-common-protos==$GOOGLEAPIS_VERSION"
  python3 -m zipfile -e .deps/download/googleapis_common_protos-"$GOOGLEAPIS_VERSION"-*.whl .deps/googleapis
  rm -rf .deps/download
  echo "$GOOGLEAPIS_VERSION" >.deps/googleapis/.version
fi
