// Which kernels serve which kinds of calls: found by asking the rule that chooses them. Pure.
#ifndef RINGATTN_WORKER_DEVICE_SERVED_CALLS_H_
#define RINGATTN_WORKER_DEVICE_SERVED_CALLS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/attention/dtype.h"
#include "common/plan/kernel_rate.h"

namespace ringattn::worker {

// Kernels of one family that a device would choose for calls of these dtypes, this direction and
// this kind. Each has a rate of its own: predictions go by it.
struct ServedCalls {
  std::string family;
  std::vector<DType> dtypes;
  bool backward = false;
  RequestKind kind;
  int64_t head_dim = 128;  // of a call of this kind, to be measured
};

// What a choice of kernels goes by, of calls with head_dim_v = head_dim.
struct ChosenBy {
  DType dtype = DType::kBFloat16;
  bool backward = false;
  bool score_terms = false;
  bool deterministic = false;
  bool softcap = false;
  int64_t head_dim = 128;

  bool operator==(const ChosenBy&) const = default;
};

// Every kind of call that the rule has kernels for, once. `family_of`: the family's name, empty if
// there is none. A deterministic backward is a kind of its own whoever serves it, for its sums
// cost; a softcap is where it changes the choice.
std::vector<ServedCalls> ServedCallsBy(absl::FunctionRef<std::string(const ChosenBy&)> family_of);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_SERVED_CALLS_H_
