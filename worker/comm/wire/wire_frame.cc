#include "worker/comm/wire/wire_frame.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "worker/comm/wire/wire_integers.h"

namespace ringattn::worker {
namespace {

constexpr uint64_t kFrameMagic = 0x5752;

absl::Status BadFrame(const char* what, uint64_t value) {
  return absl::InvalidArgumentError(absl::StrCat("malformed frame: ", what, " is ", value));
}

}  // namespace

void AppendFrame(const WireFrame& frame, std::string* bytes) {
  AppendInteger(kFrameMagic, 2, bytes);
  AppendInteger(static_cast<uint64_t>(frame.kind), 2, bytes);
  AppendInteger(frame.length, 4, bytes);
  AppendInteger(frame.sequence, 8, bytes);
  AppendInteger(frame.offset, 8, bytes);
  AppendInteger(frame.total, 8, bytes);
}

absl::StatusOr<WireFrame> ParseFrame(const char* bytes) {
  const uint64_t magic = ReadInteger(bytes, 2), kind = ReadInteger(bytes + 2, 2);
  if (magic != kFrameMagic) return BadFrame("its magic", magic);
  if (kind != static_cast<uint64_t>(WireFrame::Kind::kGrant) &&
      kind != static_cast<uint64_t>(WireFrame::Kind::kData)) {
    return BadFrame("its kind", kind);
  }
  WireFrame frame;
  frame.kind = static_cast<WireFrame::Kind>(kind);
  frame.length = static_cast<uint32_t>(ReadInteger(bytes + 4, 4));
  frame.sequence = ReadInteger(bytes + 8, 8);
  frame.offset = ReadInteger(bytes + 16, 8);
  frame.total = ReadInteger(bytes + 24, 8);
  if (frame.total == 0 || frame.total > kMaxTransferBytes) {
    return BadFrame("its transfer's size", frame.total);
  }
  if (frame.kind == WireFrame::Kind::kGrant) {
    if (frame.length != 0) return BadFrame("a grant's length", frame.length);
    if (frame.offset != 0) return BadFrame("a grant's offset", frame.offset);
    return frame;
  }
  if (frame.offset % kChunkBytes != 0 || frame.offset >= frame.total) {
    return BadFrame("its offset", frame.offset);
  }
  if (frame.length != std::min(kChunkBytes, frame.total - frame.offset)) {
    return BadFrame("its length", frame.length);
  }
  return frame;
}

}  // namespace ringattn::worker
