#!/usr/bin/env bash
# Longer versions of tests in the standard tier: 10,000 simulated clusters, 20,000 drawn cases of
# the sweep, from different seeds, two minutes of concurrent clients, ten of every fault, thousands
# of calls from Python, and the live page in a browser. Full tier.
# Full tier.
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh

status=0
# name, target, arguments
run() {
  local name=$1 target=$2
  shift 2
  if bazel run --noshow_progress "$target" -- "$@"; then
    record "pass $name"
  else
    record "fail $name"
    status=1
  fi
}
run "10,000 simulated clusters" //tests/simulation:simulation_test --seeds=10000 --first_seed=100000
run "sweep of 20,000 cases" //tests/sweep:attention_sweep_test --cases=20000 --seed=100
run "4,000 programs over K/V caches" //tests/sweep:kv_sweep_test --cases=4000 --seed=100
run "long shards, 200 cases" //tests/sweep:long_sweep_test --long_cases=200 --seed=100

name="concurrent known clients"
if bazel build --noshow_progress //server:ringattn-server //worker:ringattn-worker &&
  /usr/bin/python3 -m pytest -q -p no:cacheprovider tests/tenants; then
  record "pass $name"
else
  record "fail $name"
  status=1
fi

name="chaos, ten minutes"
if bazel build --noshow_progress //server:ringattn-server //worker:ringattn-worker \
  //tests/chaos/... && /usr/bin/python3 tests/chaos/chaos.py --minutes=10; then
  record "pass $name"
else
  record "fail $name"
  status=1
fi

name="100,000 Python calls, 10,000 regions, 10,000 residuals, 200 exits"
if RINGATTN_PYTHON_LOAD=full ./tests/lib/python_tests.sh -k "test_load or daemon_threads"; then
  record "pass $name"
else
  record "fail $name"
  status=1
fi

name="vLLM's tokens with K/V on the workers"
if RINGATTN_VLLM_TESTS=full ./tests/lib/python_tests.sh -k test_vllm; then
  record "pass $name"
else
  record "fail $name"
  status=1
fi

name="every model family of transformers"
if RINGATTN_PYTHON_FAMILIES=full ./tests/lib/python_tests.sh -k test_huggingface_families; then
  record "pass $name"
else
  record "fail $name"
  status=1
fi

name="10,000 K/V caches and 1,000,000 sequences"
if bazel build --noshow_progress //server:ringattn-server //worker:ringattn-worker &&
  RINGATTN_KV_LOAD=full /usr/bin/python3 -m pytest -q -p no:cacheprovider tests/e2e/test_kv_cache.py \
    -k many_caches; then
  record "pass $name"
else
  record "fail $name"
  status=1
fi

# The standard tier skips the browser where there is none.
name="the live page in a browser"
if ./deploy/install_deps.sh chromium fonts-dejavu-core && bazel build --noshow_progress \
  //server:ringattn-server //worker:ringattn-worker //client/... &&
  /usr/bin/python3 -m pytest -q -p no:cacheprovider tests/e2e/test_live_page.py -k browser; then
  record "pass $name"
else
  record "fail $name"
  status=1
fi
exit "$status"
