// For every input, the chunk parser stays inside its bytes, and it reads all that protobuf accepts
// as protobuf does. The first byte chooses the message type and how the rest is cut into fragments.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "common/wire/chunk_codec.h"
#include "ringattn/v1/attention.pb.h"
#include "ringattn/v1/shard.pb.h"

namespace {

using ringattn::wire::Fragment;
using ringattn::wire::ParsedMessage;

void Require(bool condition) {
  if (!condition) std::abort();
}

template <typename Message>
void CompareWithProtobuf(const ringattn::wire::StreamMessage& type,
                         const std::vector<Fragment>& fragments, const std::string& bytes) {
  const auto parsed = ringattn::wire::ParseMessage(type, fragments);
  Message expected;
  const bool legal = expected.ParseFromString(bytes);
  if (!parsed.ok()) {
    Require(!legal);
    return;
  }
  std::string payload;
  for (const Fragment& fragment : parsed->payload) {
    payload.append(reinterpret_cast<const char*>(fragment.data), fragment.size);
  }
  Require(payload.size() == parsed->payload_bytes);
  if (!legal) return;  // something was wrong in a member that only protobuf looks into
  Require(parsed->member == static_cast<int>(expected.message_case()));
  Require(parsed->is_chunk == expected.has_chunk());
  if (!expected.has_chunk()) return;
  Require(parsed->chunk.tensor == static_cast<int>(expected.chunk().tensor()));
  Require(parsed->chunk.offset == expected.chunk().offset());
  Require(parsed->chunk.crc32c.has_value() == expected.chunk().has_crc32c());
  Require(parsed->chunk.crc32c.value_or(0) == expected.chunk().crc32c());
  Require(payload == expected.chunk().data());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const int type = data[0] & 3;
  const size_t piece = 1 + (data[0] >> 2);
  const std::string bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  // Every fragment on its own heap block, so that a step outside is seen.
  std::vector<std::vector<uint8_t>> blocks;
  for (size_t at = 0; at < bytes.size(); at += piece) {
    const size_t end = std::min(bytes.size(), at + piece);
    blocks.emplace_back(bytes.begin() + at, bytes.begin() + end);
  }
  std::vector<Fragment> fragments;
  for (const auto& block : blocks) fragments.push_back({block.data(), block.size()});

  namespace wire = ringattn::wire;
  namespace v1 = ringattn::v1;
  switch (type) {
    case 0:
      CompareWithProtobuf<v1::ForwardRequest>(wire::kForwardRequest, fragments, bytes);
      break;
    case 1:
      CompareWithProtobuf<v1::BackwardResponse>(wire::kBackwardResponse, fragments, bytes);
      break;
    case 2:
      CompareWithProtobuf<v1::ExchangeRequest>(wire::kExchangeRequest, fragments, bytes);
      break;
    default:
      CompareWithProtobuf<v1::ExchangeResponse>(wire::kExchangeResponse, fragments, bytes);
  }
  return 0;
}
