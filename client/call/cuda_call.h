// A call with tensors in CUDA memory. It uses CUDA memory if possible, otherwise copies in host
// memory and any other transport.
// Tests: tests/cuda_memory/cuda_memory_fake_test.cc.
#ifndef RINGATTN_CLIENT_CALL_CUDA_CALL_H_
#define RINGATTN_CLIENT_CALL_CUDA_CALL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/api/call.h"
#include "client/call/call_registry.h"
#include "client/call/call_tensors.h"
#include "client/call/replayed_call.h"
#include "client/call/staged_call.h"
#include "client/memory/copy_pool.h"
#include "client/memory/region_index.h"

namespace ringattn::client {

// Plans copies of the tensors that lie in CUDA regions, next to each other in host memory. Copies
// nothing if there are none. Returns INVALID_ARGUMENT if a tensor begins in a CUDA region and
// extends beyond it.
template <typename Args, typename Results>
absl::Status PlanCudaCopies(const Args& args, const Results& results, const RegionIndex& regions,
                            StagingPlan* plan);

// Returns true if all non-empty tensors lie in CUDA regions.
template <typename Args, typename Results>
bool AllOnCuda(const Args& args, const Results& results, const RegionIndex& regions);

// Returns why workers cannot use the tensors now: the problem of the first region that no worker
// has attached. Empty if all regions are attached.
std::string CheckAttached(const StagingPlan& plan, const RegionIndex& regions);

struct CudaCallParams {
  std::string request_id;
  StagingPlan plan;  // from PlanCudaCopies
  // Why the call cannot use CUDA memory, as far as is known; empty if it may.
  std::string why_not;
  bool required = false;  // fail if CUDA memory cannot be used
  std::shared_ptr<const RegionIndex> regions;
  CopyPool* copies = nullptr;  // outlives the call
  std::shared_ptr<CallRegistry> registry;
  absl::Duration deadline = absl::InfiniteDuration();
  // Starts a call on the tensors in place (`host` is null) or on their copies.
  std::function<PendingCall(uint8_t* host, absl::Duration deadline,
                            const std::function<void(const CallResult&)>& done)>
      start;
  std::function<void(const CallResult&)> done;  // as ReplayedCallParams::done; may be empty
};

// Does not block.
PendingCall StartCudaCall(CudaCallParams params);

// --- Implementation -------------------------------------------------------------

namespace cuda_copies {

template <typename Bytes>
absl::Status Add(const Bytes& tensor, const RegionIndex& regions, StagingPlan* plan,
                 std::vector<StagingPlan::Tensor>* copied) {
  if (tensor.empty()) return absl::OkStatus();
  const auto begins_in = regions.Find(tensor.data(), 1);
  if (begins_in == nullptr || begins_in->cuda() == nullptr) return absl::OkStatus();
  if (regions.Find(tensor.data(), tensor.size()) == nullptr) {
    return absl::InvalidArgumentError(
        "a tensor begins in a CUDA region and extends beyond its end");
  }
  for (const StagingPlan::Tensor& each : *copied) {
    if (each.data == tensor.data() && each.bytes == tensor.size()) return absl::OkStatus();
  }
  copied->push_back(
      {const_cast<uint8_t*>(tensor.data()), tensor.size(), plan->region_bytes});  // NOLINT
  plan->region_bytes +=
      (tensor.size() + staging::kAlignment - 1) / staging::kAlignment * staging::kAlignment;
  plan->copied_bytes += tensor.size();
  return absl::OkStatus();
}

}  // namespace cuda_copies

template <typename Args, typename Results>
absl::Status PlanCudaCopies(const Args& args, const Results& results, const RegionIndex& regions,
                            StagingPlan* plan) {
  absl::Status status;
  Args in = args;
  Results out = results;
  ForEachTensor(in, [&](const ConstBytes& tensor) {
    status.Update(cuda_copies::Add(tensor, regions, plan, &plan->inputs));
  });
  ForEachTensor(out, [&](const MutableBytes& tensor) {
    status.Update(cuda_copies::Add(tensor, regions, plan, &plan->outputs));
  });
  return status;
}

template <typename Args, typename Results>
bool AllOnCuda(const Args& args, const Results& results, const RegionIndex& regions) {
  bool all = true;
  const auto look = [&](const auto& tensor) {
    if (tensor.empty()) return;
    const auto region = regions.Find(tensor.data(), tensor.size());
    all = all && region != nullptr && region->cuda() != nullptr;
  };
  Args in = args;
  Results out = results;
  ForEachTensor(in, look);
  ForEachTensor(out, look);
  return all;
}

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_CUDA_CALL_H_
