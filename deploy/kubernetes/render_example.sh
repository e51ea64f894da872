#!/usr/bin/env bash
# Renders deploy/kubernetes/example/ringattn.yaml from the chart. Needs helm in PATH, or named by $HELM.
set -euo pipefail
cd "$(dirname "$0")/../.."
example=deploy/kubernetes/example
"${HELM:-helm}" template ringattn deploy/helm/ringattn --namespace ringattn --kube-version 1.34.0 \
  -f "$example/values.yaml" >"$example/ringattn.yaml.new"
mv "$example/ringattn.yaml.new" "$example/ringattn.yaml"
