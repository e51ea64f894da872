# Counting. Each part of the run writes one line per test into $RINGATTN_TALLY:
# "pass NAME", "fail NAME" or "skip NAME: why". Sourced, not run.
: "${RINGATTN_TALLY:=$(mktemp)}"
export RINGATTN_TALLY

section() { printf '\n==== %s (%s, %d s since the start)\n' "$*" "$(date -u +%H:%M:%S)" "$SECONDS"; }
record() { printf '%s\n' "$*" >>"$RINGATTN_TALLY"; }
fatal() {
  echo "error: $*" >&2
  record "fail $*"
  close_tally
}

# Prints failures and skips by name, then the closing line; ends the run.
close_tally() {
  local passed failed skipped
  passed=$(grep -c '^pass ' "$RINGATTN_TALLY")
  failed=$(grep -c '^fail ' "$RINGATTN_TALLY")
  skipped=$(grep -c '^skip ' "$RINGATTN_TALLY")
  echo
  grep -E '^(fail|skip) ' "$RINGATTN_TALLY"
  echo "$passed passed, $failed failed, $skipped skipped"
  # A run in which nothing was counted has not tested anything.
  ((failed == 0 && passed > 0))
  exit
}
