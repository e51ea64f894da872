#!/usr/bin/env bash
# The kernels on one GPU, in one call: random cases and huge scores against fp64, compute-sanitizer,
# and speed compared with PyTorch's FA2 and cuDNN. Runs a bundle created by
#   ./deploy/bundle.sh --with=//worker/kernels/cuda:cuda_kernels_test,//tests/gpu:libringattn_kernels.so
# and needs compute-sanitizer. The speeds also need a python3 with PyTorch.
#
#   OUT=results ./tests/gpu/kernels.sh [--bundle=DIR] [--cases=N] [--seed=S] [--speed=ARGUMENTS]
#
#   --cases=N   of the check [1200]; 40 of them under each sanitizer, side by side with it
#   --speed=..  of kernel_speed.py, such as --speed="--dims 128 --lengths 4096,65536"; none: --speed=no
#
# Leaves summary.txt and one log per program in $OUT. Exits 1 if a check failed.
set -uo pipefail
cd "$(dirname "$0")/../.."

bundle=.bundle/ringattn cases=1200 seed=20261121 speed=
for option in "$@"; do
  case $option in
    --bundle=*) bundle=${option#*=} ;;
    --cases=*) cases=${option#*=} ;;
    --seed=*) seed=${option#*=} ;;
    --speed=*) speed=${option#*=} ;;
    *)
      sed -n '2,13s/^# \{0,1\}//p' "$0"
      exit 2
      ;;
  esac
done
OUT=${OUT:-.cache/gpu-kernels}
mkdir -p "$OUT"
summary=$OUT/summary.txt
: >"$summary"
check=$bundle/bin/cuda_kernels_test
[[ -x $check ]] || { echo "kernels.sh: $check is not in the bundle" >&2; exit 2; }

status=0
names=() pids=()
start() {  # NAME COMMAND...
  local name=$1
  shift
  "$@" >"$OUT/$name.log" 2>&1 &
  names+=("$name") pids+=($!)
}
start cases timeout 500 "$check" "--cases=$cases" "--seed=$seed"
for tool in memcheck racecheck synccheck initcheck; do
  # Without it a finding leaves the program's exit status as it is.
  start "$tool" timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 9 \
    "$check" --small --cases=40 "--seed=$seed"
done
for i in "${!pids[@]}"; do
  wait "${pids[$i]}"
  rc=$?
  ((rc == 0)) || status=1
  echo "${names[$i]}: exit $rc; $(grep -v '^$' "$OUT/${names[$i]}.log" | tail -1)" >>"$summary"
done

if [[ $speed != no ]]; then
  # shellcheck disable=SC2086  # several arguments
  python3 tests/gpu/kernel_speed.py --library "ours=$bundle/bin/libringattn_kernels.so" $speed \
    >"$OUT/speed.log" 2>&1 || status=1
  cat "$OUT/speed.log" >>"$summary"
fi
cat "$summary"
exit "$status"
