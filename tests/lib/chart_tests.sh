#!/usr/bin/env bash
# The Helm chart without a cluster: rendering, schemas, refusals, command lines. One tally line per case.
# Helm is the machine's or the one in .deps/k8s. Without it only the rendered example is checked, and the rest
# is skipped by name.
#
#   chart_tests.sh [PYTEST_ARGS]   runs them
#   chart_tests.sh build           builds Helm in .deps/k8s (tests/k8s/build_tools.sh), which takes minutes and
#                                  Go 1.24; the full tier does
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh

helm=$(command -v helm || true)
go_minor=$(go version 2>/dev/null | sed -n 's/^go version go1\.\([0-9]*\).*$/\1/p')
if [[ ${1:-} == build ]]; then
  [[ -n $helm ]] && exit 0
  ((${go_minor:-0} >= 24)) || { echo "chart_tests.sh: Helm needs Go 1.24; this is 1.${go_minor:-?}" >&2; exit 0; }
  ./tests/k8s/build_tools.sh helm
  exit
fi
[[ -n $helm || ! -x .deps/k8s/bin/helm ]] || helm=$PWD/.deps/k8s/bin/helm
export RINGATTN_HELM=$helm

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
