#!/usr/bin/env bash
# Runs every C++ test: bazel test //.... One tally line per GoogleTest case, or per target where a target has
# no cases. Two targets run at a time; those tagged "exclusive" measure time and run alone.
#
#   unit_tests.sh early   builds them with one compiler, then runs one at a time, except those tagged "exclusive",
#                         so that other tests can run meanwhile. Bazel keeps what passed.
#   unit_tests.sh         builds and runs them
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh

if [[ ${1:-} == early ]]; then
  ./deploy/build.sh .cache/unit_tests_build.log --keep_going --jobs=1 //... &&
    bazel test --noshow_progress --keep_going --local_test_jobs=1 --test_tag_filters=-exclusive //...
  exit
fi

./deploy/build.sh .cache/unit_tests_build.log --keep_going //... || true  # what failed to build fails below

log=$(mktemp)
trap 'rm -f "$log"' EXIT
bazel test --noshow_progress --keep_going --local_test_jobs=2 --test_summary=short \
  --test_output=errors //... 2>&1 | tee "$log"
status=${PIPESTATUS[0]}

logs=$(bazel info bazel-testlogs 2>/dev/null)
before=$(wc -l <"$RINGATTN_TALLY")
# The cases of a target; the target itself where it reports none.
cases() {
  local target=$1 result=$2 path reports
  path=${target#//}
  mapfile -t reports < <(find -L "$logs/${path/://}" -name test.xml 2>/dev/null)
  if ((${#reports[@]} == 0)) || ! python3 tests/lib/tally_junit.py "$target" "${reports[@]}" >>"$RINGATTN_TALLY"; then
    record "$result $target"
  elif [[ $result == fail ]] && ! grep -qF "fail $target " "$RINGATTN_TALLY"; then
    record "fail $target"  # it ended before its cases were reported
  fi
}
while read -r target result _; do
  case $result in
    PASSED) cases "$target" pass ;;
    SKIPPED) record "skip $target: needs a CUDA toolkit" ;;
    FAILED | TIMEOUT | FLAKY) cases "$target" fail ;;
    NO) record "fail $target: did not build" ;;
  esac
done < <(grep -E '^//[^ ]+ +(\(cached\)|PASSED|FAILED|TIMEOUT|FLAKY|SKIPPED|NO STATUS)' "$log" | sed 's/(cached) *//')
# A test that no target names never runs. (Those of the CUDA kernels have targets only where
# there is a toolkit.)
for file in $(comm -23 \
  <(find client common server tests worker -name '*_test.cc' ! -path 'worker/kernels/cuda/*' | sort) \
  <(bazel query 'labels(srcs, tests(//...)) + labels(textual_hdrs, //...)' 2>/dev/null | sed 's#^//##; s#:#/#' | sort -u)); do
  record "fail $file: no target runs it"
  status=1
done
# A build error fails the run even where Bazel lists no target.
if ((status != 0)) && ! tail -n +"$((before + 1))" "$RINGATTN_TALLY" | grep -q '^fail '; then
  record "fail bazel test //... (exit $status)"
fi
exit "$status"
