// A call that is staged: the library copies the inputs into a staging region, makes the call on
// the copies, and copies the results out.
// Tests: staged_call_test.cc.
#ifndef RINGATTN_CLIENT_CALL_STAGED_CALL_H_
#define RINGATTN_CLIENT_CALL_STAGED_CALL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/time/time.h"
#include "client/api/call.h"
#include "client/call/call_registry.h"
#include "client/call/call_tensors.h"
#include "client/call/replayed_call.h"
#include "client/memory/copy_pool.h"
#include "client/memory/region_index.h"
#include "client/memory/staging_pool.h"

namespace ringattn::client {

// The tensors that are staged, and their offsets in the region.
struct StagingPlan {
  struct Tensor {
    uint8_t* data = nullptr;  // the caller's; inputs are only read
    uint64_t bytes = 0;
    uint64_t offset = 0;
  };
  std::vector<Tensor> inputs, outputs;
  uint64_t region_bytes = 0;
  uint64_t copied_bytes = 0;
  uint64_t input_bytes = 0;  // of all inputs, staged or not
};

// Plans staging of the tensors that lie in no region. `only_dout`: of a Backward's inputs only dout
// and DLSE.
template <typename Args, typename Results>
StagingPlan PlanStaging(const Args& args, const Results& results, const RegionIndex& regions,
                        bool only_dout = false);
// Points `args` and `results` to the staged copies, which begin at `base`.
template <typename Args, typename Results>
void PointToStage(const StagingPlan& plan, uint8_t* base, Args* args, Results* results);

struct StagedCallParams {
  std::string request_id;
  StagingPlan plan;
  // A region that is ready, or null: `pool` provides one.
  std::shared_ptr<SharedRegion> region;
  StagingPool* pool = nullptr;  // both outlive the call
  CopyPool* copies = nullptr;
  std::shared_ptr<CallRegistry> registry;  // contains the call until its end
  absl::Duration deadline = absl::InfiniteDuration();
  // Starts the inner call. `base` is null if the tensors are not staged, for the reason `why_not`.
  std::function<PendingCall(uint8_t* base, const std::string& why_not, absl::Duration deadline,
                            const std::function<void(const CallResult&)>& done)>
      start;
  std::function<void(const CallResult&)> done;  // as ReplayedCallParams::done; may be empty
};

// Copies small inputs if the region is ready. Otherwise the copying threads do all the work, and it
// does not block.
PendingCall StartStagedCall(StagedCallParams params);

// --- Implementation -------------------------------------------------------------

namespace staging {

inline constexpr uint64_t kAlignment = 64;

template <typename Bytes>
void Add(const Bytes& tensor, const RegionIndex& regions, StagingPlan* plan,
         std::vector<StagingPlan::Tensor>* staged) {
  if (tensor.empty() || regions.Find(tensor.data(), tensor.size()) != nullptr) return;
  for (const StagingPlan::Tensor& each : *staged) {
    if (each.data == tensor.data() && each.bytes == tensor.size()) return;  // k is also given as v
  }
  staged->push_back(
      {const_cast<uint8_t*>(tensor.data()), tensor.size(), plan->region_bytes});  // NOLINT
  plan->region_bytes += (tensor.size() + kAlignment - 1) / kAlignment * kAlignment;
  plan->copied_bytes += tensor.size();
}

template <typename Bytes>
void Point(const std::vector<StagingPlan::Tensor>& staged, uint8_t* base, Bytes* tensor) {
  for (const StagingPlan::Tensor& each : staged) {
    if (each.data != tensor->data() || each.bytes != tensor->size()) continue;
    *tensor = Bytes(base + each.offset, each.bytes);
    return;
  }
}

}  // namespace staging

template <typename Args, typename Results>
StagingPlan PlanStaging(const Args& args, const Results& results, const RegionIndex& regions,
                        bool only_dout) {
  StagingPlan plan;
  Args in = args;
  if constexpr (std::is_same_v<Args, BackwardArgs>) {
    if (only_dout) {
      in.q = in.k = in.v = in.out = in.lse = {};
      in.more.clear();
      const auto dlse = args.more.find(v1::TENSOR_ID_DLSE);
      if (dlse != args.more.end()) in.more.insert(*dlse);
    }
  }
  Results out = results;
  ForEachTensor(in, [&](const ConstBytes& t) {
    staging::Add(t, regions, &plan, &plan.inputs);
    plan.input_bytes += t.size();
  });
  ForEachTensor(out,
                [&](const MutableBytes& t) { staging::Add(t, regions, &plan, &plan.outputs); });
  return plan;
}

template <typename Args, typename Results>
void PointToStage(const StagingPlan& plan, uint8_t* base, Args* args, Results* results) {
  ForEachTensor(*args, [&](ConstBytes& t) { staging::Point(plan.inputs, base, &t); });
  ForEachTensor(*results, [&](MutableBytes& t) { staging::Point(plan.outputs, base, &t); });
}

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_STAGED_CALL_H_
