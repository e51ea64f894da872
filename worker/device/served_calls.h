// Finds which kernels serve which kinds of calls, by evaluating the rule that selects them. Pure
// functions.
#ifndef RINGATTN_WORKER_DEVICE_SERVED_CALLS_H_
#define RINGATTN_WORKER_DEVICE_SERVED_CALLS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/attention/dtype.h"
#include "common/plan/kernel_rate.h"

namespace ringattn::worker {

// Kernels of one family that a device selects for calls of these dtypes, direction and kind. Each
// entry has a separate rate for predictions.
struct ServedCalls {
  std::string family;
  std::vector<DType> dtypes;
  bool backward = false;
  RequestKind kind;
  int64_t head_dim = 128;  // of the call that measures this entry
};

// The properties by which kernels are selected, for calls with head_dim_v = head_dim.
struct ChosenBy {
  DType dtype = DType::kBFloat16;
  bool backward = false;
  bool score_terms = false;
  bool deterministic = false;
  bool softcap = false;
  int64_t head_dim = 128;

  bool operator==(const ChosenBy&) const = default;
};

// Returns every kind of call for which the rule has kernels, once. `family_of` returns the family's
// name, or an empty string if there is none. A deterministic backward is always a separate kind,
// because its ordered sums cost time. A softcap is one only where it changes the selection.
std::vector<ServedCalls> ServedCallsBy(absl::FunctionRef<std::string(const ChosenBy&)> family_of);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_SERVED_CALLS_H_
