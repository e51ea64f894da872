#include "client/transfer/transfer.h"

#include <algorithm>
#include <cassert>

#include "absl/strings/str_cat.h"
#include "client/transfer/server_error.h"
#include "client/transfer/tensor_bytes.h"
#include "common/wire/crc32c.h"

namespace ringattn::client {
namespace {

std::string NameOf(const wire::ChunkHeader& header) {
  return absl::StrCat("chunk of ", TensorIdName(static_cast<v1::TensorId>(header.tensor)), " at ",
                      header.offset, " ");
}

// Copies the payload to bytes of `target` from `begin` on. Returns its CRC-32C if `with_crc`.
std::optional<uint32_t> CopyPayload(absl::Span<const wire::Fragment> payload, uint64_t begin,
                                    bool with_crc, const MutableRuns& target) {
  if (target.in_one_piece()) {
    if (with_crc) return wire::CopyFragmentsAndCrc32c(payload, target.data() + begin);
    wire::CopyFragments(payload, target.data() + begin);
    return std::nullopt;
  }
  uint32_t crc = 0;
  for (const wire::Fragment& fragment : payload) {
    if (with_crc) crc = wire::ExtendCrc32c(crc, fragment.data, fragment.size);
    CopyIn(fragment.data, begin, fragment.size, target);
    begin += fragment.size;
  }
  return with_crc ? std::optional(crc) : std::nullopt;
}

}  // namespace

uint64_t ChunkBytesUp(uint64_t wanted, const v1::Accepted& accepted) {
  constexpr uint64_t kUsual = 1 << 20;
  uint64_t bytes = wanted;
  if (bytes == 0) bytes = accepted.recommended_chunk_bytes();
  if (bytes == 0) bytes = kUsual;
  const uint64_t most = accepted.max_chunk_bytes_up();
  return most > 0 ? std::min(bytes, most) : bytes;
}

ChunkSource::ChunkSource(std::vector<InputTensor> inputs, uint64_t max_chunk_bytes)
    : inputs_(std::move(inputs)), max_chunk_bytes_(max_chunk_bytes) {
  assert(max_chunk_bytes >= 1);
  for (const InputTensor& input : inputs_) total_bytes_ += input.bytes.size();
}

std::optional<ChunkSource::Chunk> ChunkSource::Next() {
  while (index_ < inputs_.size() && offset_ == inputs_[index_].bytes.size()) {
    ++index_;
    offset_ = 0;
  }
  if (index_ == inputs_.size()) return std::nullopt;
  const InputTensor& input = inputs_[index_];
  const uint64_t bytes = std::min<uint64_t>(max_chunk_bytes_, input.bytes.size() - offset_);
  Chunk chunk{.tensor = input.tensor, .offset = offset_, .bytes = {}};
  if (input.bytes.in_one_piece()) {
    chunk.bytes = {input.bytes.data() + offset_, bytes};
  } else {
    chunk.gathered.reset(new uint8_t[bytes]);  // not zeroed
    CopyOut(input.bytes, offset_, bytes, chunk.gathered.get());
    chunk.bytes = {chunk.gathered.get(), bytes};
  }
  offset_ += bytes;
  dealt_bytes_ += bytes;
  return chunk;
}

OutputAssembler::OutputAssembler(std::vector<OutputTensor> outputs) {
  for (OutputTensor& output : outputs) {
    total_bytes_ += output.bytes.size();
    outputs_.push_back(
        {.tensor = output, .arrived = ByteRangeSet(static_cast<int64_t>(output.bytes.size()))});
  }
}

OutputAssembler::Output* OutputAssembler::Find(int tensor) {
  for (Output& output : outputs_) {
    if (output.tensor.tensor == tensor) return &output;
  }
  return nullptr;
}

absl::Status OutputAssembler::CheckAnnounced(
    const google::protobuf::RepeatedPtrField<v1::TensorDescriptor>& announced) const {
  for (const Output& output : outputs_) {
    const auto same = [&](const v1::TensorDescriptor& descriptor) {
      return descriptor.tensor() == output.tensor.tensor &&
             descriptor.bytes() == output.tensor.bytes.size();
    };
    if (std::count_if(announced.begin(), announced.end(), same) != 1) {
      return ServerError(absl::StrCat("Accepted does not announce ",
                                      TensorIdName(output.tensor.tensor), " with ",
                                      output.tensor.bytes.size(), " bytes"));
    }
  }
  if (announced.size() != static_cast<int>(outputs_.size())) {
    return ServerError("Accepted announces outputs that were not requested");
  }
  return absl::OkStatus();
}

absl::Status OutputAssembler::Claim(const wire::ChunkHeader& header, uint64_t payload_bytes) {
  Output* output = Find(header.tensor);
  if (output == nullptr) {
    return ServerError(absl::StrCat("chunk of tensor ", header.tensor, ", not an output"));
  }
  const std::string chunk = NameOf(header);
  switch (output->arrived.Add(header.offset, payload_bytes)) {
    case ByteRangeSet::Added::kNew:
      break;
    case ByteRangeSet::Added::kOutside:
      return ServerError(absl::StrCat(chunk, "with ", payload_bytes, " bytes, beyond its ",
                                      output->tensor.bytes.size()));
    case ByteRangeSet::Added::kOverlaps:
      return ServerError(absl::StrCat(chunk, "overlaps an earlier chunk"));
    case ByteRangeSet::Added::kTooManyRanges:
      return ServerError(absl::StrCat(chunk, "leaves too many gaps"));
  }
  return absl::OkStatus();
}

absl::Status OutputAssembler::Add(const wire::ChunkHeader& header,
                                  absl::Span<const wire::Fragment> payload,
                                  uint64_t payload_bytes) {
  absl::Status status = Claim(header, payload_bytes);
  return status.ok() ? Fill(header, payload, payload_bytes) : status;
}

absl::Status OutputAssembler::Fill(const wire::ChunkHeader& header,
                                   absl::Span<const wire::Fragment> payload,
                                   uint64_t payload_bytes) {
  if (payload_bytes == 0) return absl::OkStatus();
  const MutableRuns& target = Find(header.tensor)->tensor.bytes;
  const auto crc = CopyPayload(payload, header.offset, header.crc32c.has_value(), target);
  if (crc != header.crc32c) {
    return absl::DataLossError(absl::StrCat(NameOf(header), "has a wrong crc32c"));
  }
  received_bytes_ += payload_bytes;
  return absl::OkStatus();
}

absl::Status OutputAssembler::CheckComplete() const {
  if (received_bytes_ == total_bytes_) return absl::OkStatus();
  return ServerError(absl::StrCat("the stream ended with ", received_bytes(), " of ", total_bytes_,
                                  " output bytes sent"));
}

}  // namespace ringattn::client
