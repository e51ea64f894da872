#!/usr/bin/env bash
# The service on a machine with GPUs, in one call: tests, the sweep against the fp64 oracle, rings with
# rates and where their time goes, the peer, requests in flight, memory, lost workers, the quick start.
# Everything is verified before it is timed. Runs a bundle created by
#   ./deploy/bundle.sh --with=//worker/device/cuda:cuda_device_test,//worker/comm/nccl:nccl_ring_test,//worker/comm/peer:peer_ring_test,//tests/e2e:service_sweep
# and needs only bash, a plain python3, a driver and NCCL (deploy/find_nccl.sh); the part
# "peer" needs a python3 with PyTorch.
#
#   OUT=results ./tests/gpu/service.sh [--bundle=DIR] [--only=PART,...] [--seconds=S] [--workers=N]
#                                      [--ring_transport=NAME[,NAME]] [--worker_flag=FLAG] [--scratch=DIR] [--peer_python=P]
#   ./tests/gpu/service.sh --help    names all parts
#   ./tests/gpu/service.sh --cpu     the same logic with CPU workers and small requests
#
# Leaves at most eight files in $OUT: summary.md and summary.json are the result, service.log says what
# was run, traces.zip holds a timeline of every ring pass. Parts have time limits and do not depend on
# each other's success. Exits 1 if any failed; a goal that was missed is listed and fails nothing.
#
# Parts that fit in a call of ten minutes on four GPUs (estimated seconds; at most --seconds=570):
#   370 s  --only=smoke,sweep,64k,32k,packed,256k,kill,stop,kill-backward,stop-backward,window,full,peer
#   300 s  --only=agree,128k,64k-mha,128k-mha,256k-mha,peer,in-flight,memory,end-to-end,quickstart
#   300 s  --only=tests,512k,512k-mha,1m       (generates 21 GB of input during the tests)
#   290 s  --only=hosts                        (four GPUs; four workers share two GPUs or one, at 24 s
#             for each start; parts: hosts-hops, hosts-one, hosts-wire, hosts-nccl; the bundle also needs
#             //worker/comm/mixed:mixed_hop_rate)
#   200 s  --only=hosts-exposed,hosts-unequal  (two to four GPUs; the bundle also needs
#             //common/plan/testing:ring_times; with four, hosts-hidden as well)
#   340 s  --only=kv                           (the bundle also needs //tests/e2e:kv_service_sweep,
#             //tests/bench:kv_gpu_bench and //worker/kernels/cuda/paged:paged_bench)
# Tokens per GPU decide how well a ring can do: 8K, 16K and 64K of them are 32k, 64k and 256k on four
# GPUs, 16k, 32k and 128k on two (--workers=2), 64k, 128k and 512k on eight.
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
