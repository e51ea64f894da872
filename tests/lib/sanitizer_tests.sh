#!/usr/bin/env bash
# Address and undefined-behaviour sanitizers: every unit test, and the end-to-end
# suite's service, tools, fault, host memory and residual cases against instrumented processes. Full tier.
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh

targets=(//common/... //worker/... //server/... //client/... //tests/sweep/...)

log=$(mktemp)
trap 'rm -f "$log"' EXIT
bazel test --noshow_progress --keep_going --config=asan --test_output=errors "${targets[@]}" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
while read -r target result _; do
  case $result in
    PASSED) record "pass asan+ubsan $target" ;;
    FAILED | TIMEOUT | FLAKY | NO) record "fail asan+ubsan $target" ;;
  esac
done < <(grep -E '^//[^ ]+ +(\(cached\)|PASSED|FAILED|TIMEOUT|FLAKY|NO STATUS)' "$log" | sed 's/(cached) *//')
((status == 0)) || record "fail asan+ubsan (bazel exit $status)"

# A small quarantine: one of the cases watches resident memory.
export ASAN_OPTIONS=quarantine_size_mb=4:thread_local_quarantine_size_kb=64
bazel build --noshow_progress --config=asan //server:ringattn-server //worker:ringattn-worker \
  //client/... && bin=$(bazel info --config=asan bazel-bin 2>/dev/null) &&
  RINGATTN_BIN=$bin ./tests/lib/e2e_tests.sh -k 'test_service or test_tools or test_faults or test_host_memory or test_residuals' || status=1
exit "$status"
