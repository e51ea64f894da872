// TransportChoice: the transports that a request's header permits. A plain value.
#ifndef RINGATTN_COMMON_REQUEST_TRANSPORT_CHOICE_H_
#define RINGATTN_COMMON_REQUEST_TRANSPORT_CHOICE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/attention/tensors.h"
#include "common/layout/writer_rows.h"

namespace ringattn {

enum class TransportKind : uint8_t { kCoordinatorStream, kDirectStream, kHostMemory, kCudaMemory };

// A tensor, or a writer's rows of it, in one of the client's regions.
struct TensorLocationChoice {
  TensorId tensor = TensorId::kQ;
  std::string region_id;
  int64_t offset = 0;
  int64_t bytes = 0;  // the tensor's size; offset + bytes does not overflow
  int writer = 0;
  uint64_t fence_number = 0;
};

struct TransportChoice {
  std::vector<TransportKind> accept;  // in order of preference; empty: the header has no preference
  bool required = false;
  std::vector<TensorLocationChoice> places;
  // Why no region can hold this request's tensors, whatever the workers support; empty if one can.
  std::string why_not_places;
  // The same for direct streams.
  std::string why_not_direct;
  // The client that sent this header, if the request has several.
  std::optional<WriterChoice> writer;
  // All of them, by index, once they have joined; `places` then has the locations of all, and
  // `accept` what all accept. Empty: one client.
  std::vector<WriterRows> writers;

  bool says_nothing() const { return accept.empty(); }
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_TRANSPORT_CHOICE_H_
