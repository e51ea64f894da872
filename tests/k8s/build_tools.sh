#!/usr/bin/env bash
# Builds what a Kubernetes cluster of two nodes needs, from the Go module proxy, into .deps/k8s/bin (or
# $RINGATTN_K8S_TOOLS/bin), and prints that folder: etcd, the six Kubernetes programs, CoreDNS and Helm.
# Tools of the right version are kept. About ten minutes at first on 2 cores, a second afterwards.
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/go.sh

KUBERNETES_VERSION=v1.34.4
COREDNS_VERSION=v1.12.4
HELM_VERSION=v3.22.0
PROGRAMS=(kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl)

use_go >&2 || exit 1
tools=${RINGATTN_K8S_TOOLS:-$PWD/.deps/k8s}
mkdir -p "$tools/bin" "$tools/build"
tools=$(realpath "$tools")
export CGO_ENABLED=0 GOWORK=off GOFLAGS="-mod=mod -buildvcs=false"

is_current() { # is_current NAME VERSION
  [[ -x $tools/bin/$1 && $(cat "$tools/bin/$1.version" 2>/dev/null) == "$2" ]]
}

built() { # built NAME VERSION SECONDS
  echo "$2" >"$tools/bin/$1.version"
  echo "built $1 $2 in $3 s" >&2
}

# A main module of our own that takes Kubernetes' own requirements, with the folders that its source tree
# replaces ("./staging/src/...") turned into the published modules of the same release.
write_kubernetes_module() {
  local source published=v0.${KUBERNETES_VERSION#v1.}
  source=$(cd "$tools/build" && GOFLAGS= go mod download -json "k8s.io/kubernetes@$KUBERNETES_VERSION" |
    sed -n 's/^.*"Dir": "\(.*\)",$/\1/p')
  mkdir -p "$tools/build/kubernetes/etcd"
  cd "$tools/build/kubernetes"
  sed -e 's#^module .*#module example.test/kubernetes#' \
    -e "s#\(k8s.io/[a-z-]*\) => ./staging/src/k8s.io/.*#\1 => \1 $published#" "$source/go.mod" >go.mod
  echo "require k8s.io/kubernetes $KUBERNETES_VERSION" >>go.mod
  cp "$source/go.sum" go.sum
  chmod u+w go.mod go.sum
  cat >etcd/main.go <<'END'
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
END
}

build_kubernetes() {
  local missing=() program
  for program in etcd "${PROGRAMS[@]}"; do
    is_current "$program" "$KUBERNETES_VERSION" || missing+=("$program")
  done
  ((${#missing[@]})) || return 0
  (
    write_kubernetes_module
    # The API server takes its own version from these, and refuses to start without.
    local about=k8s.io/component-base/version minor=${KUBERNETES_VERSION#v1.}
    local flags="-s -w -X $about.gitVersion=$KUBERNETES_VERSION -X $about.gitMajor=1"
    flags+=" -X $about.gitMinor=${minor%%.*} -X $about.gitTreeState=clean"
    for program in "${missing[@]}"; do
      local package=k8s.io/kubernetes/cmd/$program began=$SECONDS
      [[ $program == etcd ]] && package=./etcd
      nice -n 19 go build -trimpath -ldflags "$flags" -o "$tools/bin/$program" "$package" >&2
      built "$program" "$KUBERNETES_VERSION" $((SECONDS - began))
    done
  )
}

# Only the plugins that a cluster's own names need: with all of them it takes minutes and 80 MB.
build_coredns() {
  is_current coredns "$COREDNS_VERSION" && return
  local began=$SECONDS
  mkdir -p "$tools/build/coredns"
  (
    cd "$tools/build/coredns"
    printf 'module example.test/coredns\n\ngo 1.24\n' >go.mod
    cat >main.go <<'END'
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() {
	dnsserver.Directives = []string{"errors", "ready", "cache", "kubernetes"}
	coremain.Run()
}
END
    go get "github.com/coredns/coredns@$COREDNS_VERSION" >&2
    nice -n 19 go build -trimpath -ldflags '-s -w' -o "$tools/bin/coredns" . >&2
  )
  built coredns "$COREDNS_VERSION" $((SECONDS - began))
}

build_helm() {
  is_current helm "$HELM_VERSION" && return
  local began=$SECONDS
  # Without a cluster to ask, charts are rendered for this version; unset it is 1.20.
  local minor=${KUBERNETES_VERSION#v1.} about=helm.sh/helm/v3/pkg/chartutil
  local flags="-s -w -X $about.k8sVersionMajor=1 -X $about.k8sVersionMinor=${minor%%.*}"
  GOBIN=$tools/bin GOFLAGS=-buildvcs=false nice -n 19 go install -trimpath -ldflags "$flags" \
    "helm.sh/helm/v3/cmd/helm@$HELM_VERSION" >&2
  built helm "$HELM_VERSION" $((SECONDS - began))
}

only=${1:-all}
case $only in
  all) build_helm && build_kubernetes && build_coredns ;;
  helm) build_helm ;;
  *) echo "usage: build_tools.sh [helm]" >&2 && exit 2 ;;
esac
echo "$tools/bin"
