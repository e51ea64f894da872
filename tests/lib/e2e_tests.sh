#!/usr/bin/env bash
# Runs the end-to-end suite, one tally line per case. It uses the distribution's Python, whose gRPC and numpy
# install_deps.sh brings.
#
#   e2e_tests.sh build               only builds the programs
#   e2e_tests.sh [PYTEST_ARGUMENT..] builds them and runs the suite. With RINGATTN_PROGRAMS_BUILT=yes it builds
#                                    nothing: Bazel would wait for a build that runs meanwhile.
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh

PROGRAMS=(//server:ringattn-server //worker:ringattn-worker //client:ringattn //client/examples/...
  //tests/e2e/... //tests/chaos/...)

[[ ${1:-} != build ]] || exec ./deploy/build.sh .cache/programs_build.log "${PROGRAMS[@]}"

./deploy/install_deps.sh python3-pytest python3-grpcio python3-numpy prometheus patchelf libprotobuf-java
[[ ${RINGATTN_PROGRAMS_BUILT:-} == yes ]] || ./deploy/build.sh .cache/programs_build.log "${PROGRAMS[@]}" ||
  { record "fail end-to-end build"; exit 1; }

report=$(mktemp --suffix=.xml)
trap 'rm -f "$report"' EXIT
/usr/bin/python3 -m pytest -q -p no:cacheprovider --durations=8 --junit-xml="$report" tests/e2e tests/hosts tests/writers "$@"
status=$?
/usr/bin/python3 tests/lib/tally_junit.py e2e "$report" >>"$RINGATTN_TALLY" ||
  record "fail end-to-end suite (no report)"
((status == 0)) || record "fail end-to-end suite (pytest exit $status)"
exit "$status"
