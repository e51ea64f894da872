#!/usr/bin/env bash
# Builds the container image of ringattn without a registry: server, worker, command line and their
# libraries on an otherwise empty root (deploy/image/rootfs.sh), as an OCI archive that every container
# runtime imports (podman load, ctr images import, skopeo copy oci-archive:...).
#
#   ./deploy/image.sh [options]
#     --output=FILE    the archive [.bundle/ringattn-VERSION.oci.tar]
#     --name=NAME:TAG  the image's name in it [localhost/ringattn:VERSION]
#     --bundle=DIR     pack this bundle instead of making one with deploy/bundle.sh
#     --with-nccl      libnccl.so.2 as a second layer (200 MB), for rings of GPUs over several machines
#
# One image for CPUs and GPUs: built with CUDA where a toolkit is found (deploy/install_cuda.sh). The GPU's
# driver comes from the host's container runtime.
set -euo pipefail
cd "$(dirname "$0")/.."
source deploy/lib_path.sh

version=$(sed -n 's/^.*kVersion\[\] = "\(.*\)";$/\1/p' common/base/version.h)
[[ -n $version ]] || { echo "image.sh: no version in common/base/version.h" >&2; exit 1; }
output=.bundle/ringattn-$version.oci.tar
name=localhost/ringattn:$version
bundle=
with_nccl=false
for option in "$@"; do
  case $option in
    --output=*) output=${option#*=} ;;
    --name=*) name=${option#*=} ;;
    --bundle=*) bundle=${option#*=} ;;
    --with-nccl) with_nccl=true ;;
    *)
      sed -n '2,13s/^# \{0,1\}//p' "$0"
      exit 2
      ;;
  esac
done

command -v buildah >/dev/null || ./deploy/install_deps.sh buildah
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
if [[ -z $bundle ]]; then
  ./deploy/bundle.sh --output="$work/bundle" >/dev/null
  bundle=$work/bundle
fi
revision=$(sed -n 's/^commit: \([0-9a-f]*\).*$/\1/p' "$bundle/MANIFEST")
bytes=$(./deploy/image/rootfs.sh --bundle="$bundle" --output="$work/rootfs")

# A separate store, so that the user's images are neither read nor changed. Plain copies need no mounts.
builder() {
  buildah --root="$work/storage" --runroot="$work/run" --storage-driver=vfs "$@"
}
# Files and image get the time of the last commit, so that equal sources make equal layers.
created=$(git log -1 --format=%ct 2>/dev/null || date +%s)
container=$(builder from scratch)
builder copy --quiet "$container" "$work/rootfs" / >/dev/null
builder config \
  --user=65532:65532 --workingdir=/tmp --cmd='["ringattn","--help"]' \
  --env=PATH=/opt/ringattn/bin \
  --env=LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/lib64 \
  --env=NVIDIA_DRIVER_CAPABILITIES=compute,utility \
  --port=7700/tcp --port=7701/tcp --port=7702/tcp --port=7703/tcp \
  --label=org.opencontainers.image.title=ringattn \
  --label=org.opencontainers.image.description="Exact attention as a service: coordinator, worker and command line" \
  --label=org.opencontainers.image.licenses=Apache-2.0 \
  --label=org.opencontainers.image.version="$version" \
  --label=org.opencontainers.image.revision="${revision:-unknown}" "$container"
builder commit --quiet --format=oci --timestamp="$created" "$container" "$name" >/dev/null
if $with_nccl; then
  nccl=$(./deploy/find_nccl.sh) || { echo "image.sh: no libnccl.so.2 found" >&2; exit 1; }
  [[ -n $nccl ]] || nccl=$(library_path libnccl.so.2)
  second=$(builder from --pull-never "$name")
  builder copy --quiet "$second" "$(realpath "$nccl")" /opt/ringattn/lib/libnccl.so.2 >/dev/null
  builder commit --quiet --format=oci --timestamp="$created" "$second" "$name" >/dev/null
fi
mkdir -p "$(dirname "$output")"
rm -f "$output"
builder push --quiet "$name" "oci-archive:$output:$name"
echo "$name in $output: $((bytes >> 20)) MiB unpacked$($with_nccl && echo ', and NCCL' || true)," \
  "$(($(stat -c %s "$output") >> 20)) MiB to carry"
