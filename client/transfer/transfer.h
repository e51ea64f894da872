// The two ends of a tensor stream, over the caller's memory and without I/O: which
// chunk to send next, and where a received chunk belongs.
#ifndef RINGATTN_CLIENT_TRANSFER_TRANSFER_H_
#define RINGATTN_CLIENT_TRANSFER_TRANSFER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "client/api/call.h"
#include "client/transfer/byte_runs.h"
#include "common/attention/tensors.h"
#include "common/base/byte_range_set.h"
#include "common/wire/chunk_codec.h"
#include "ringattn/v1/attention.pb.h"
#include "ringattn/v1/tensor.pb.h"

namespace ringattn::client {

struct InputTensor {
  v1::TensorId tensor;
  ConstRuns bytes;
  TensorLayout layout = {};  // how it is cut into shards
};

struct OutputTensor {
  v1::TensorId tensor;
  MutableRuns bytes;
  TensorLayout layout = {};
};

// The size of chunks up: `wanted`, or what the server recommends where that is 0, or 1 MiB
// where it recommends nothing; never more than it takes. At least 1.
uint64_t ChunkBytesUp(uint64_t wanted, const v1::Accepted& accepted);

// Deals the inputs out in chunks, tensor after tensor. Thread compatible.
class ChunkSource {
 public:
  struct Chunk {
    v1::TensorId tensor;
    uint64_t offset;
    ConstBytes bytes;
    // What `bytes` lie in if they are gathered; null if they are the caller's.
    std::unique_ptr<uint8_t[]> gathered = nullptr;
  };

  // REQUIRES: max_chunk_bytes >= 1.
  ChunkSource(std::vector<InputTensor> inputs, uint64_t max_chunk_bytes);

  std::optional<Chunk> Next();

  uint64_t total_bytes() const { return total_bytes_; }
  uint64_t dealt_bytes() const { return dealt_bytes_; }

 private:
  std::vector<InputTensor> inputs_;
  uint64_t max_chunk_bytes_;
  size_t index_ = 0;
  uint64_t offset_ = 0;
  uint64_t total_bytes_ = 0;
  uint64_t dealt_bytes_ = 0;
};

// Puts received chunks into their places. Thread compatible, but for what Fill says.
class OutputAssembler {
 public:
  explicit OutputAssembler(std::vector<OutputTensor> outputs);

  // INTERNAL unless the server announces these very outputs, byte for byte.
  absl::Status CheckAnnounced(
      const google::protobuf::RepeatedPtrField<v1::TensorDescriptor>& announced) const;

  // A chunk in two steps. Errors, after which the outputs are worthless: INTERNAL for one of an
  // unknown tensor, out of range, overlapping an earlier one or leaving too many gaps.
  absl::Status Claim(const wire::ChunkHeader& header, uint64_t payload_bytes);
  // DATA_LOSS if the crc differs. Side by side with all else: the bytes are the chunk's alone.
  // REQUIRES: it was claimed.
  absl::Status Fill(const wire::ChunkHeader& header, absl::Span<const wire::Fragment> payload,
                    uint64_t payload_bytes);
  // Both.
  absl::Status Add(const wire::ChunkHeader& header, absl::Span<const wire::Fragment> payload,
                   uint64_t payload_bytes);

  // INTERNAL if bytes are missing.
  absl::Status CheckComplete() const;

  uint64_t total_bytes() const { return total_bytes_; }
  uint64_t received_bytes() const { return received_bytes_.load(); }

 private:
  struct Output {
    OutputTensor tensor;
    ByteRangeSet arrived;
  };

  Output* Find(int tensor);

  std::vector<Output> outputs_;
  uint64_t total_bytes_ = 0;
  std::atomic<uint64_t> received_bytes_{0};
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_TRANSFER_TRANSFER_H_
