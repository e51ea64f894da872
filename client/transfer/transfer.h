// The two ends of a tensor stream on the caller's memory, without I/O: which chunk to send next,
// and where to put a received chunk.
// Tests: transfer_test.cc.
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
  TensorLayout layout = {};  // how it is sharded
};

struct OutputTensor {
  v1::TensorId tensor;
  MutableRuns bytes;
  TensorLayout layout = {};
};

// Returns the chunk size for uploads: `wanted`, or the server's recommendation if that is 0, or 1
// MiB without a recommendation. Never more than the server accepts; at least 1.
uint64_t ChunkBytesUp(uint64_t wanted, const v1::Accepted& accepted);

// Returns the inputs in chunks, tensor by tensor. Thread compatible.
class ChunkSource {
 public:
  struct Chunk {
    v1::TensorId tensor;
    uint64_t offset;
    ConstBytes bytes;
    // The buffer of gathered bytes; null if `bytes` is the caller's memory.
    std::unique_ptr<uint8_t[]> gathered = nullptr;
  };

  // Requires max_chunk_bytes >= 1.
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

// Puts received chunks into the outputs. Thread compatible, except for Fill.
class OutputAssembler {
 public:
  explicit OutputAssembler(std::vector<OutputTensor> outputs);

  // Returns INTERNAL unless the server announces exactly these outputs and sizes.
  absl::Status CheckAnnounced(
      const google::protobuf::RepeatedPtrField<v1::TensorDescriptor>& announced) const;

  // Accepts a chunk in two steps. Errors: INTERNAL for a chunk of an unknown tensor, out of range,
  // overlapping an earlier chunk, or leaving too many gaps. After an error the outputs are
  // undefined.
  absl::Status Claim(const wire::ChunkHeader& header, uint64_t payload_bytes);
  // Copies the chunk's bytes. Returns DATA_LOSS if the crc differs. May run concurrently with
  // everything else, because the bytes belong to this chunk alone. Requires a successful Claim.
  absl::Status Fill(const wire::ChunkHeader& header, absl::Span<const wire::Fragment> payload,
                    uint64_t payload_bytes);
  // Claim and Fill.
  absl::Status Add(const wire::ChunkHeader& header, absl::Span<const wire::Fragment> payload,
                   uint64_t payload_bytes);

  // Returns INTERNAL if bytes are missing.
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
