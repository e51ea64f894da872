#!/usr/bin/env bash
# Checks and times the paged kernels on one GPU: random cases against fp64, compute-sanitizer, and speed
# compared with contiguous keys, a device copy, FlashAttention-3 and PyTorch. Runs a bundle created with
#   ./deploy/bundle.sh --with=//worker/kernels/cuda/paged:paged_check,//worker/kernels/cuda/paged:paged_bench,//tests/gpu:libringattn_paged.so,//tests/sweep:kv_gpu_sweep
# Requires compute-sanitizer. The peers also require a python3 with PyTorch.
#
#   OUT=results ./tests/gpu/paged.sh [--bundle=DIR] [--cases=N] [--seed=S] [--sanitized=N]
#       [--bench=no] [--peers=ARGUMENTS] [--programs=N]
#
#   --cases=N      random cases of the check [1200]
#   --sanitized=N  tiny cases under each tool of compute-sanitizer, concurrently with the check [16]
#   --programs=N   programs of steps over caches: with block tables that travel with the calls, and with
#                  tables that stay in device memory [150]
#   --peers=..     arguments of paged_peers.py, such as --peers="--batches 1,16"; no: skip the peers
#
# Writes summary.txt, paged.csv with all figures and one log per program to $OUT. The script times
# nothing unless every check has passed. Exits 1 if a check failed.
set -uo pipefail
cd "$(dirname "$0")/../.."

bundle=.bundle/ringattn cases=1200 seed=20261127 sanitized=16 bench=yes peers= programs=150
for option in "$@"; do
  case $option in
    --bundle=*) bundle=${option#*=} ;;
    --cases=*) cases=${option#*=} ;;
    --seed=*) seed=${option#*=} ;;
    --sanitized=*) sanitized=${option#*=} ;;
    --bench=*) bench=${option#*=} ;;
    --peers=*) peers=${option#*=} ;;
    --programs=*) programs=${option#*=} ;;
    *)
      sed -n '2,17s/^# \{0,1\}//p' "$0"
      exit 2
      ;;
  esac
done
OUT=${OUT:-.cache/gpu-paged}
mkdir -p "$OUT"
summary=$OUT/summary.txt
: >"$summary"
check=$bundle/bin/paged_check
[[ -x $check ]] || { echo "paged.sh: $check is not in the bundle" >&2; exit 2; }
# Built with RINGATTN_RACECHECK: every thread arrives at barriers (sm90/MEMORY_ORDER.md).
race_check=$bundle/bin/paged_check_race
[[ -x $race_check ]] || race_check=$check

status=0
names=() pids=()
start() {  # NAME COMMAND...
  local name=$1
  shift
  "$@" >"$OUT/$name.log" 2>&1 &
  names+=("$name") pids+=($!)
}
start check timeout 500 "$check" "--cases=$cases" "--seed=$seed"
start tables timeout 300 "$bundle/bin/kv_gpu_sweep" "--cases=$programs"
start resident_tables timeout 300 "$bundle/bin/kv_gpu_sweep" "--cases=$programs" --resident_tables
if ((sanitized > 0)); then
  for tool in memcheck racecheck synccheck initcheck; do
    program=$check
    [[ $tool != racecheck ]] || program=$race_check
    # Without it a finding leaves the program's exit status as it is.
    start "$tool" timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$program" --small "--cases=$sanitized" "--seed=$seed"
  done
fi
for i in "${!pids[@]}"; do
  wait "${pids[$i]}"
  rc=$?
  ((rc == 0)) || status=1
  echo "${names[$i]}: exit $rc; $(grep -v '^$' "$OUT/${names[$i]}.log" | tail -1)" >>"$summary"
done
if ((status != 0)); then
  cat "$summary"
  exit 1
fi

figures=$OUT/paged.csv
: >"$figures"
if [[ $bench != no ]]; then
  "$bundle/bin/paged_bench" >>"$figures" 2>"$OUT/bench.log" || status=1
fi
if [[ $peers != no ]]; then
  # shellcheck disable=SC2086  # several arguments
  python3 tests/gpu/paged_peers.py --library "$bundle/bin/libringattn_paged.so" $peers \
    >>"$figures" 2>"$OUT/peers.log" || status=1
fi
cat "$summary" "$figures"
exit "$status"
