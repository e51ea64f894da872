#!/usr/bin/env bash
# The chart on a real Kubernetes of two nodes on this machine, with everything that happens to pods, nodes
# and releases. One tally line per case, times at the end. Called by `tests/run.sh --k8s`, or alone:
#
#   ./tests/k8s/run.sh [PYTEST ARGUMENTS]      RINGATTN_K8S_KEEP=1 keeps the nodes' logs
#
# Builds Kubernetes itself at first (tests/k8s/build_tools.sh, about ten minutes), needs no registry and
# leaves nothing behind. Skips, and says why, where it cannot run.
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh
source tests/lib/go.sh

skip() {
  echo "skipped: $*" >&2
  record "skip kubernetes: $*"
  exit 0
}
# Why it cannot run here; nothing if it can.
obstacle() {
  ((EUID == 0)) || { echo "nodes are namespaces, which needs root" && return; }
  unshare --pid --fork --mount --net --cgroup true 2>/dev/null ||
    { echo "this machine allows no namespaces" && return; }
  [[ -d /sys/fs/cgroup/memory && -d /sys/fs/cgroup/cpuset ]] ||
    { echo "nodes divide control groups of version 1, which are not mounted here" && return; }
  local kib
  kib=$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo)
  ((kib > 4 << 20)) || { echo "needs 4 GiB of free memory" && return; }
  local why
  why=$(use_go) || { echo "building Kubernetes $why" && return; }
}

why=$(obstacle)
[[ -z $why ]] || skip "$why"
./deploy/install_deps.sh buildah containerd runc containernetworking-plugins iptables nftables conntrack ipset \
  socat iproute2 procps openssl python3-pytest patchelf ||
  { record "fail kubernetes: packages"; exit 1; }
bin=$(./tests/k8s/build_tools.sh) || { record "fail kubernetes: building its programs"; exit 1; }
./deploy/install_grpcurl.sh >/dev/null || { record "fail kubernetes: building grpcurl"; exit 1; }
${BAZEL:-bazel} build --noshow_progress //server:ringattn-server //worker:ringattn-worker //client:ringattn ||
  { record "fail kubernetes: building ringattn"; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
./deploy/bundle.sh --bin=bazel-bin --output="$work/bundle" >/dev/null &&
  ./deploy/image.sh --bundle="$work/bundle" --name=localhost/ringattn:test \
    --output="$work/ringattn.oci.tar" ||
  { record "fail kubernetes: the image"; exit 1; }

export RINGATTN_K8S_BIN=$bin RINGATTN_K8S_IMAGE=$work/ringattn.oci.tar
export RINGATTN_K8S_CLI=$work/bundle/bin/ringattn PYTHONDONTWRITEBYTECODE=1
/usr/bin/python3 -m pytest -q -p no:cacheprovider --junit-xml="$work/report.xml" tests/k8s "$@"
status=$?
/usr/bin/python3 tests/lib/tally_junit.py kubernetes "$work/report.xml" >>"$RINGATTN_TALLY" ||
  record "fail kubernetes (no report)"
((status == 0)) || record "fail kubernetes (pytest exit $status)"
exit "$status"
