// TransportChoice: how a request's tensors may travel, as its header says. A plain value.
#ifndef RINGATTN_COMMON_REQUEST_TRANSPORT_CHOICE_H_
#define RINGATTN_COMMON_REQUEST_TRANSPORT_CHOICE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/attention/tensors.h"

namespace ringattn {

enum class TransportKind : uint8_t { kCoordinatorStream, kDirectStream, kHostMemory, kCudaMemory };

// A whole tensor in a region of the client's.
struct TensorLocationChoice {
  TensorId tensor = TensorId::kQ;
  std::string region_id;
  int64_t offset = 0;
  int64_t bytes = 0;  // the tensor's; offset + bytes does not overflow
};

struct TransportChoice {
  std::vector<TransportKind> accept;  // the best first; empty: the header says nothing
  bool required = false;
  std::vector<TensorLocationChoice> places;
  uint64_t fence_number = 0;
  // Why no memory of the client's can serve this request, whatever the workers have; empty: some
  // can.
  std::string why_not_places;
  // Likewise of streams straight to the workers.
  std::string why_not_direct;

  bool says_nothing() const { return accept.empty(); }
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_TRANSPORT_CHOICE_H_
