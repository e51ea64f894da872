#!/usr/bin/env bash
# The container image, without a container runtime: what is in it, how it is described, and its programs
# in its root alone. One tally line each.
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh

((EUID == 0)) || { record "skip image: running programs in its root needs root"; exit 0; }
./deploy/install_deps.sh buildah patchelf || { record "fail image: packages"; exit 1; }
${BAZEL:-bazel} build --noshow_progress //server:ringattn-server //worker:ringattn-worker //client:ringattn ||
  { record "fail image: build"; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{ ./deploy/bundle.sh --bin=bazel-bin --output="$work/bundle" >/dev/null &&
  ./deploy/image.sh --bundle="$work/bundle" --output="$work/image.tar"; } ||
  { record "fail image: deploy/image.sh"; exit 1; }
python3 tests/image/check_image.py "$work/image.tar" "$work/root" >>"$RINGATTN_TALLY" ||
  { record "fail image"; exit 1; }
