#!/usr/bin/env bash
# Generates the package ringattn/v1 of this module from the protos.
#   ./generate.sh PROTO_FOLDER GOOGLEAPIS_FOLDER
# GOOGLEAPIS_FOLDER contains google/rpc/status.proto.
set -euo pipefail
protos=$(realpath "$1")
googleapis=$(realpath "$2")
cd "$(dirname "$0")"
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
GOBIN=$tools go install google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
PATH=$tools:$PATH protoc -I"$protos" -I"$googleapis" -I/usr/include \
  --go_out=. --go_opt=module=ringattn --go-grpc_out=. --go-grpc_opt=module=ringattn "$protos"/ringattn/v1/*.proto
