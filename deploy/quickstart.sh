#!/usr/bin/env bash
# From a bare Debian 12 or Ubuntu 24.04 machine to a running, verified service.
#
#   ./deploy/quickstart.sh          install what is missing, build, start a coordinator and
#                                   workers, run a verified request, leave it running
#   ./deploy/quickstart.sh --prebuilt=BUNDLE
#                                   the same from a folder of deploy/bundle.sh, where
#                                   nothing can be installed or built
#   ./deploy/quickstart.sh --stop   end the service
#
# One worker per GPU (eight at most), or four on the CPU. Run again while the service is up, it
# verifies that one instead of starting another.
set -euo pipefail
cd "$(dirname "$0")/.."

STATE_DIR=${RINGATTN_STATE_DIR:-$PWD/.cache/quickstart}
PORT=${RINGATTN_PORT:-7700}
CLI=$PWD/bazel-bin/client/ringattn

METRICS_PORT=${RINGATTN_METRICS_PORT:-7702}

say() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

stop() {
  # The service may have been started from another build.
  [[ -f $STATE_DIR/cli ]] && CLI=$(<"$STATE_DIR/cli")
  if [[ -x $CLI && -d $STATE_DIR ]]; then
    "$CLI" down --state_dir="$STATE_DIR" || true
  fi
  rm -rf "$STATE_DIR"
}

prebuilt=
case "${1:-}" in
  --stop)
    stop
    echo "stopped"
    exit 0
    ;;
  --prebuilt=*)
    prebuilt=$(realpath "${1#*=}")
    CLI=$prebuilt/bin/ringattn
    [[ -x $CLI ]] || { echo "quickstart.sh: $prebuilt is not a bundle (see deploy/bundle.sh)" >&2; exit 2; }
    ;;
  '') ;;
  *)
    sed -n '2,14s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
workers=4
((gpus == 0)) || workers=$((gpus < 8 ? gpus : 8))

if [[ -z $prebuilt ]]; then
  say "installing missing packages"
  ./deploy/install_deps.sh
  ((gpus == 0)) || ./deploy/install_cuda.sh >/dev/null

  say "building the coordinator, the worker and the command-line client; the log is .cache/build.log"
  jobs=()
  [[ -z ${BAZEL_JOBS:-} ]] || jobs=(--jobs="$BAZEL_JOBS")
  ./deploy/build.sh .cache/build.log "${jobs[@]}" \
    //server:ringattn-server //worker:ringattn-worker //client:ringattn
fi
if ((gpus > 0)) && [[ -z ${RINGATTN_NCCL:-} ]]; then
  nccl=$(./deploy/find_nccl.sh) && export RINGATTN_NCCL=$nccl
fi

say "starting a coordinator and $workers workers"
mkdir -p "$STATE_DIR" && chmod 700 "$STATE_DIR"
echo "$CLI" >"$STATE_DIR/cli"
address=127.0.0.1:$PORT
metrics_port=$METRICS_PORT
if (exec 3<>"/dev/tcp/127.0.0.1/$metrics_port") 2>/dev/null; then
  echo "port $metrics_port is taken; the live page and metrics get a free port"
  metrics_port=0
fi
if "$CLI" info --server="$address" --deadline=5s >/dev/null 2>&1; then
  echo "already running at $address"
else
  "$CLI" up --workers="$workers" --port="$PORT" --metrics_port="$metrics_port" --detach --state_dir="$STATE_DIR" \
    >"$STATE_DIR/up.log" 2>&1 || {
    cat "$STATE_DIR/up.log" >&2
    exit 1
  }
fi

say "verifying a forward and a backward of 8,192 tokens through a ring of $workers against an fp64 reference"
work=$STATE_DIR/work
mkdir -p "$work"
schedule=ring
((workers > 1)) || schedule=single
options=(--causal --schedule=$schedule --world_size="$workers")
"$CLI" generate --output="$work/input.safetensors" --batch=1 --seq_len=8192 --heads=8 --kv_heads=2 \
  --head_dim=64 --dtype=bf16 --seed=1 --with_dout
"$CLI" forward --server="$address" --input="$work/input.safetensors" \
  --output="$work/forward.safetensors" "${options[@]}"
"$CLI" backward --server="$address" --input="$work/input.safetensors" \
  --output="$work/backward.safetensors" "${options[@]}"
"$CLI" verify --input="$work/input.safetensors" --output="$work/backward.safetensors" \
  --forward="$work/forward.safetensors" --causal

cat <<END

ringattn is up and verified after $SECONDS s. gRPC address: $address
$(grep -h "live page" "$STATE_DIR/up.log" 2>/dev/null || true)

Try:
  $CLI topology --server=$address
  $CLI bench --server=$address --seq_len=8192 --heads=8 --kv_heads=2 --head_dim=64 --dtype=bf16 --causal
  grpcurl -plaintext -d '{"header":{"shape":{"batch":1,"seq_len_q":1,"seq_len_kv":1,"num_heads":1,"head_dim":1},"dtype":"DATA_TYPE_FLOAT32","inline_tensors":[{"tensor":"TENSOR_ID_Q","data":"AACAPw=="},{"tensor":"TENSOR_ID_K","data":"AACAPw=="},{"tensor":"TENSOR_ID_V","data":"AAAAQA=="}]}}' $address ringattn.v1.AttentionService/Forward
  (grpcurl itself: ./deploy/install_grpcurl.sh builds it and prints its path)

Stop it:
  ./deploy/quickstart.sh --stop
END
