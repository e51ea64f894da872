#!/usr/bin/env bash
# Runs every fuzz target of //tests/fuzz for ten minutes, from its corpus. One tally line per target. (The
# standard tier replays the corpora as unit tests.)
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh

seconds=600
targets=(chunk_codec safetensors header step_stream kv_request)

mapfile -t labels < <(printf '//tests/fuzz:%s_fuzz\n' "${targets[@]}")
bazel build --noshow_progress --config=fuzz "${labels[@]}" ||
  { record "fail fuzz targets did not build"; exit 1; }
bin=$(bazel info --config=fuzz bazel-bin 2>/dev/null)

status=0
for target in "${targets[@]}"; do
  found=$(mktemp -d)
  if timeout $((seconds + 120)) "$bin/tests/fuzz/${target}_fuzz" -max_total_time="$seconds" \
    -rss_limit_mb=2048 -timeout=10 -print_final_stats=1 -artifact_prefix="$found/" \
    "$found" "tests/fuzz/corpus/$target" >"$found.log" 2>&1; then
    record "pass fuzz $target ($(grep -o 'number_of_executed_units: *[0-9]*' "$found.log" | grep -o '[0-9]*$') inputs)"
  else
    tail -40 "$found.log"
    record "fail fuzz $target"
    status=1
  fi
  rm -rf "$found" "$found.log"
done
exit "$status"
