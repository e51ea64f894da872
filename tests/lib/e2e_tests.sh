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

./deploy/install_deps.sh python3-pytest python3-pytest-xdist python3-grpcio python3-numpy prometheus patchelf libprotobuf-java iproute2 procps
[[ ${RINGATTN_PROGRAMS_BUILT:-} == yes ]] || ./deploy/build.sh .cache/programs_build.log "${PROGRAMS[@]}" ||
  { record "fail end-to-end build"; exit 1; }

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
# name, pytest arguments...
run() {
  local name=$1
  shift
  /usr/bin/python3 -m pytest -q -p no:cacheprovider --durations=8 --junit-xml="$reports/$name.xml" \
    tests/e2e tests/equal_requests tests/hosts tests/writers "$@"
  local ended=$?
  ((ended != 5)) || ended=0  # the arguments select no test of this kind
  return "$ended"
}
status=0
# Processes wait for one another most of the time, so four tests run at once. Those that bound a time run alone.
run together -n 4 --dist loadfile -m "not timed" "$@" || status=$?
run timed -m timed "$@" || status=$?
/usr/bin/python3 tests/lib/tally_junit.py e2e "$reports"/*.xml >>"$RINGATTN_TALLY" ||
  record "fail end-to-end suite (no report)"
((status == 0)) || record "fail end-to-end suite (pytest exit $status)"
exit "$status"
