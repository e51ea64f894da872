#!/usr/bin/env bash
# The service on a machine with GPUs, in one call: device and ring tests, the sweep against the fp64
# oracle, long requests with rates, memory and overlap, and lost workers. Runs a bundle made by
#   ./deploy/bundle.sh --with=//worker/device/cuda:cuda_device_test,//worker/comm/nccl:nccl_ring_test,//tests/e2e:service_sweep
# and needs nothing beside it but bash, a plain python3, a driver and NCCL (deploy/find_nccl.sh).
#
#   OUT=results ./tests/gpu/service.sh [--bundle=DIR] [--workers=N] [--seconds=S] [--only=PART,...]
#   ./tests/gpu/service.sh --cpu     the same logic with CPU workers and small requests
#
# Leaves at most eight files in $OUT: summary.json is the result, service.log says what was run. Parts
# have time limits and do not depend on each other's success. Exits 1 if any failed.
set -uo pipefail
cd "$(dirname "$0")/../.."

export OUT=${OUT:-$PWD/.cache/gpu-service}
# Multicast serves collectives, which nothing here uses; shared hosts may not stand it.
export NCCL_NVLS_ENABLE=0
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}  # into the workers' logs
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
if [[ -z ${RINGATTN_NCCL:-} ]]; then
  nccl=$(./deploy/find_nccl.sh) && [[ -n $nccl ]] && export RINGATTN_NCCL=$nccl
fi
mkdir -p "$OUT"
exec python3 tests/gpu/service/main.py "$@"
