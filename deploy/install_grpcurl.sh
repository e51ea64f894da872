#!/usr/bin/env bash
# Builds grpcurl from the Go module proxy into .deps/bin and prints its path. No
# distribution packages it. The version is the newest that Debian 12's Go compiles.
set -euo pipefail
cd "$(dirname "$0")/.."

GRPCURL_VERSION=v1.8.7
target=.deps/bin/grpcurl
if [[ ! -x $target ]] || [[ $(cat .deps/bin/grpcurl.version 2>/dev/null) != "$GRPCURL_VERSION" ]]; then
  command -v go >/dev/null || ./deploy/install_deps.sh golang-go
  mkdir -p .deps/bin
  GOBIN=$PWD/.deps/bin GOFLAGS=-buildvcs=false \
    go install "github.com/fullstorydev/grpcurl/cmd/grpcurl@$GRPCURL_VERSION" >&2
  echo "$GRPCURL_VERSION" >.deps/bin/grpcurl.version
fi
echo "$PWD/$target"
