#!/usr/bin/env bash
# Runs the end-to-end suite, one tally line per case. It uses the distribution's Python, whose gRPC and numpy
# install_deps.sh brings. Arguments are pytest's.
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh

./deploy/install_deps.sh python3-pytest python3-grpcio python3-numpy prometheus patchelf
./deploy/build.sh .cache/e2e_build.log //server:ringattn-server //worker:ringattn-worker //client/... \
  //tests/e2e/... //tests/chaos/... || { record "fail end-to-end build"; exit 1; }

report=$(mktemp --suffix=.xml)
trap 'rm -f "$report"' EXIT
/usr/bin/python3 -m pytest -q -p no:cacheprovider --durations=8 --junit-xml="$report" tests/e2e "$@"
status=$?
/usr/bin/python3 tests/lib/tally_junit.py e2e "$report" >>"$RINGATTN_TALLY" ||
  record "fail end-to-end suite (no report)"
((status == 0)) || record "fail end-to-end suite (pytest exit $status)"
exit "$status"
