#!/usr/bin/env bash
# Makes an image of one static program, without a registry.
#   static_image.sh NAME:TAG PROGRAM ARCHIVE
set -euo pipefail
name=$1 program=$2 archive=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
builder() { buildah --root="$work/storage" --runroot="$work/run" --storage-driver=vfs "$@"; }
container=$(builder from scratch)
builder copy --quiet "$container" "$program" "/$(basename "$program")" >/dev/null
builder config --entrypoint "[\"/$(basename "$program")\"]" "$container"
builder commit --quiet "$container" "$name" >/dev/null
rm -f "$archive"
builder push --quiet "$name" "oci-archive:$archive:$name"
