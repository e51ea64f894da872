#!/usr/bin/env bash
# Builds Bazel targets and shows how far it is.
#
#   deploy/build.sh LOG [BAZEL_FLAG...] TARGET...
#
# Bazel's output goes to LOG. Standard output gets a line every ten seconds: steps done, steps in all, and
# seconds. After a failure it shows the first error and names LOG; the exit status is Bazel's.
# BAZEL names another Bazel.
set -uo pipefail
log=$1
shift
mkdir -p "$(dirname "$log")"
: >"$log"

# Bazel counts steps as it discovers them, so the total grows at the beginning.
show_progress() {
  local begin=$SECONDS shown=0 line
  while IFS= read -r line; do
    printf '%s\n' "$line" >>"$log"
    if [[ $line =~ ^\[([0-9,]+)\ /\ ([0-9,]+)\] ]] && ((SECONDS - shown >= 10)); then
      shown=$SECONDS
      printf '  %s of %s steps, %d s\n' "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" $((SECONDS - begin))
    fi
  done
}

begin=$SECONDS
"${BAZEL:-bazel}" build --color=no --curses=no --show_progress_rate_limit=2 "$@" 2>&1 | show_progress
status=${PIPESTATUS[0]}
if ((status == 0)); then
  printf '  built in %d s\n' $((SECONDS - begin))
else
  echo "  the build failed after $((SECONDS - begin)) s. The first error:" >&2
  grep -m 1 -A 4 -E '(^|: )(fatal )?error: |^ERROR: ' "$log" | sed 's/^/    /' >&2
  echo "  The whole output: $log" >&2
  if grep -qE 'Killed|cannot allocate memory|out of memory' "$log"; then
    echo "  A compiler ran out of memory. Try again with BAZEL_JOBS=1." >&2
  fi
fi
exit "$status"
