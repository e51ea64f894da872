#!/usr/bin/env bash
# The end-to-end suite, one tally line per case. It uses the distribution's
# Python, whose gRPC and numpy install_deps.sh brings.
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh

./deploy/install_deps.sh python3-pytest python3-grpcio python3-numpy prometheus patchelf
bazel build --noshow_progress //server:ringattn-server //worker:ringattn-worker //client/... \
  //tests/e2e/... //tests/chaos/... || { record "fail end-to-end build"; exit 1; }

report=$(mktemp --suffix=.xml)
trap 'rm -f "$report"' EXIT
/usr/bin/python3 -m pytest -q -p no:cacheprovider --durations=8 --junit-xml="$report" tests/e2e "$@"
status=$?
/usr/bin/python3 - "$report" >>"$RINGATTN_TALLY" <<'END' || record "fail end-to-end suite (no report)"
import sys
import xml.etree.ElementTree as tree

for case in tree.parse(sys.argv[1]).iter("testcase"):
    name = f"e2e {case.get('classname')}.{case.get('name')}"
    if case.find("failure") is not None or case.find("error") is not None:
        print("fail", name)
    elif case.find("skipped") is not None:
        print(f"skip {name}: {case.find('skipped').get('message')}")
    else:
        print("pass", name)
END
((status == 0)) || record "fail end-to-end suite (pytest exit $status)"
exit "$status"
