# Counting and timing. Each part of the run writes one line per test into $RINGATTN_TALLY:
# "pass NAME", "fail NAME" or "skip NAME: why". Sections write their cost into $RINGATTN_COSTS. Sourced, not run.
: "${RINGATTN_TALLY:=$(mktemp)}"
: "${RINGATTN_COSTS:=$(mktemp)}"
export RINGATTN_TALLY RINGATTN_COSTS

# Sections and what they may cost on two cores from nothing: "name,processor seconds".
BUDGET=tests/lib/budget.csv
# A run may exceed the sum of the budget by so much.
BUDGET_SLACK_PERCENT=20

# A fixed loop takes so many processor milliseconds while a run of the budget is under way. Processors, and their
# neighbours on one machine, differ by a factor of two; a slower one may spend more in proportion.
REFERENCE_LOOP_MS=120
LOOP_EVERY_SECONDS=20

# Times the loop during the run, one number per line into the file, until it is killed. As busy as the tests are.
sample_speed() { # file
  local TIMEFORMAT=%3U i
  while :; do
    { time for ((i = 0; i < 100000; i++)); do :; done; } 2>&1 | awk '{print int($1 * 1000)}' >>"$1"
    sleep "$LOOP_EVERY_SECONDS"
  done
}

# The median of the loop's times in percent of the reference, at least 100.
slowness_percent() {
  sort -n "$1" | awk -v reference="$REFERENCE_LOOP_MS" '
    {times[NR] = $1}
    END {percent = NR ? int(times[int((NR + 1) / 2)] * 100 / reference) : 100; print percent < 100 ? 100 : percent}'
}

# Processor seconds that all processes of this machine have spent so far.
processor_seconds() { awk '/^cpu /{print int(($2 + $3 + $4 + $7 + $8) / 100)}' /proc/stat; }

# name, title: ends the section before and begins another.
section() {
  end_section
  section_name=$1
  section_begin=$SECONDS
  section_processor=$(processor_seconds)
  local estimate
  estimate=$(sed -n "s/^$1,//p" "$BUDGET" 2>/dev/null)
  printf '\n==== %s (%s, %d s since the start%s)\n' "$2" "$(date -u +%H:%M:%S)" "$SECONDS" \
    "${estimate:+; at most about $((estimate / $(nproc))) s}"
}

end_section() {
  [[ -n ${section_name:-} ]] || return 0
  echo "$section_name,$((SECONDS - section_begin)),$(($(processor_seconds) - section_processor))" >>"$RINGATTN_COSTS"
  section_name=
}

record() { printf '%s\n' "$*" >>"$RINGATTN_TALLY"; }
fatal() {
  echo "error: $*" >&2
  record "fail $*"
  close_tally
}

# Prints what took longest and compares the total with the budget.
report_costs() {
  [[ -s $RINGATTN_COSTS ]] || return 0
  echo
  echo "Time by section:"
  sort -t, -k2 -n -r "$RINGATTN_COSTS" |
    awk -F, '{printf "  %5d s, %5d processor seconds  %s\n", $2, $3, $1}'
  if [[ -n ${RINGATTN_SLOWEST:-} && -s $RINGATTN_SLOWEST ]]; then
    echo "Slowest tests:"
    sort -n -r "$RINGATTN_SLOWEST" | head -15 | awk '{t = $1; $1 = ""; printf "  %7.1f s %s\n", t, $0}'
  fi
  # Other work on a developer's machine counts too, so only continuous integration judges.
  [[ ${CI:-} == true && -f $BUDGET ]] || return 0
  local spent allowed slowness
  slowness=$(slowness_percent "${RINGATTN_SPEED:-/dev/null}")
  echo "A fixed loop takes $slowness% of the time for which the budget of processor time was made."
  spent=$(awk -F, '{sum += $3} END {print int(sum)}' "$RINGATTN_COSTS")
  allowed=$(awk -F, '!/^#/ {sum += $2} END {print int(sum)}' "$BUDGET")
  allowed=$((allowed * slowness / 100))
  if ((spent * 100 > allowed * (100 + BUDGET_SLACK_PERCENT))); then
    record "fail processor time: $spent s, over the budget of $allowed s by more than $BUDGET_SLACK_PERCENT% ($BUDGET)"
  else
    record "pass processor time: $spent of $allowed s"
  fi
}

# Prints failures and skips by name, then the closing line; ends the run.
close_tally() {
  end_section
  report_costs
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
