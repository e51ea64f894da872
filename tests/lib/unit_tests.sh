#!/usr/bin/env bash
# bazel test //..., one tally line per test target.
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh

log=$(mktemp)
trap 'rm -f "$log"' EXIT
bazel test --noshow_progress --keep_going --local_test_jobs=1 --test_summary=short \
  --test_output=errors //... 2>&1 | tee "$log"
status=${PIPESTATUS[0]}

before=$(wc -l <"$RINGATTN_TALLY")
while read -r target result _; do
  case $result in
    PASSED | '(cached)') record "pass $target" ;;
    SKIPPED) record "skip $target: its platform is not here" ;;
    FAILED | TIMEOUT | FLAKY) record "fail $target" ;;
    NO) record "fail $target: did not build" ;;
  esac
done < <(grep -E '^//[^ ]+ +(\(cached\)|PASSED|FAILED|TIMEOUT|FLAKY|SKIPPED|NO STATUS)' "$log" | sed 's/(cached) *//')
# A test that no target names never runs. (Those of the CUDA kernels have targets only where
# there is a toolkit.)
for file in $(comm -23 \
  <(find client common server tests worker -name '*_test.cc' ! -path 'worker/kernels/cuda/*' | sort) \
  <(bazel query 'labels(srcs, tests(//...))' 2>/dev/null | sed 's#^//##; s#:#/#' | sort)); do
  record "fail $file: no target runs it"
  status=1
done
# A build error fails the run even where Bazel lists no target.
if ((status != 0)) && ! tail -n +"$((before + 1))" "$RINGATTN_TALLY" | grep -q '^fail '; then
  record "fail bazel test //... (exit $status)"
fi
exit "$status"
