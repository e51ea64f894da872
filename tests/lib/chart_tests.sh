#!/usr/bin/env bash
# The Helm chart without a cluster: rendering, schemas, refusals, command lines. One tally line per case.
# Helm is the machine's or the one in .deps/k8s. Without it only the rendered example is checked, and the rest
# is skipped by name.
#
#   chart_tests.sh [PYTEST_ARGS]   runs them
#   chart_tests.sh build           builds Helm in .deps/k8s (tests/k8s/build_tools.sh) with Go 1.24: 450 processor
#                                  seconds from nothing, 7 with Go's cache of an earlier build
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh
source tests/lib/go.sh

helm=$(command -v helm || true)
if [[ ${1:-} == build ]]; then
  [[ -n $helm ]] && exit 0
  use_go >&2 || exit 0
  ./tests/k8s/build_tools.sh helm
  exit
fi
[[ -n $helm || ! -s .deps/k8s/bin/helm.version ]] || helm=$PWD/.deps/k8s/bin/helm
export RINGATTN_HELM=$helm RINGATTN_NO_HELM=
if [[ -z $helm ]]; then
  if RINGATTN_NO_HELM=$(use_go); then
    RINGATTN_NO_HELM="not built yet; ./tests/lib/chart_tests.sh build takes 450 processor seconds"
  fi
fi

# Schemas of Kubernetes' objects, version by version, that need no network to be looked up.
VALIDATOR=kubernetes-validate==1.37.0

./deploy/install_deps.sh python3-venv python3-pytest
venv=.deps/chart
if ! "$venv/bin/python" -m pip show -q "${VALIDATOR%%=*}" 2>/dev/null; then
  /usr/bin/python3 -m venv --clear --system-site-packages "$venv" &&
    "$venv/bin/python" -m pip install -q --disable-pip-version-check "$VALIDATOR" ||
    { record "fail chart: $VALIDATOR could not be installed"; exit 1; }
fi
${BAZEL:-bazel} build --noshow_progress //server:ringattn-server //worker:ringattn-worker //client:ringattn ||
  { record "fail chart: build"; exit 1; }

report=$(mktemp --suffix=.xml)
trap 'rm -f "$report"' EXIT
PYTHONDONTWRITEBYTECODE=1 "$venv/bin/python" -m pytest -q -p no:cacheprovider --junit-xml="$report" \
  tests/chart "$@"
status=$?
/usr/bin/python3 tests/lib/tally_junit.py chart "$report" >>"$RINGATTN_TALLY" ||
  record "fail chart (no report)"
((status == 0)) || record "fail chart (pytest exit $status)"
exit "$status"
