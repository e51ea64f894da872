#include "common/local_memory/attach_protocol.h"

namespace ringattn {
namespace {

constexpr uint32_t kAttach = 1;
constexpr uint32_t kFence = 2;
constexpr size_t kHeadBytes = 8;

void Append32(uint32_t value, std::string* to) {
  for (int shift = 0; shift < 32; shift += 8) to->push_back(static_cast<char>(value >> shift));
}

void Append64(uint64_t value, std::string* to) {
  Append32(static_cast<uint32_t>(value), to);
  Append32(static_cast<uint32_t>(value >> 32), to);
}

// REQUIRES: there are so many bytes.
uint64_t Read(absl::string_view from, size_t at, int bytes) {
  uint64_t value = 0;
  for (int i = bytes - 1; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(from[at + i]);
  return value;
}

std::string Head(uint32_t second) {
  std::string bytes;
  Append32(kAttachVersion, &bytes);
  Append32(second, &bytes);
  return bytes;
}

}  // namespace

std::string Encode(const AttachMessage& message) { return Head(kAttach) + message.token; }

std::string Encode(const FenceMessage& message) {
  std::string bytes = Head(kFence);
  Append64(message.number, &bytes);
  return bytes;
}

std::optional<ClientMessage> ReadClientMessage(absl::string_view datagram) {
  if (datagram.size() < kHeadBytes || Read(datagram, 0, 4) != kAttachVersion) return std::nullopt;
  const uint64_t kind = Read(datagram, 4, 4);
  const absl::string_view rest = datagram.substr(kHeadBytes);
  if (kind == kAttach && rest.size() == kAttachTokenBytes) return AttachMessage{std::string(rest)};
  if (kind == kFence && rest.size() == 8) return FenceMessage{Read(rest, 0, 8)};
  return std::nullopt;
}

std::string Encode(const WorkerAnswer& answer) {
  std::string bytes = Head(static_cast<uint32_t>(answer.code));
  if (answer.code == AttachCode::kFenced) {
    Append64(answer.number, &bytes);
  } else {
    bytes.append(answer.words, 0, kMaxAttachDatagramBytes - kHeadBytes);
  }
  return bytes;
}

std::optional<WorkerAnswer> ReadWorkerAnswer(absl::string_view datagram) {
  if (datagram.size() < kHeadBytes || Read(datagram, 0, 4) != kAttachVersion) return std::nullopt;
  const uint64_t code = Read(datagram, 4, 4);
  if (code > static_cast<uint64_t>(AttachCode::kFenced)) return std::nullopt;
  WorkerAnswer answer;
  answer.code = static_cast<AttachCode>(code);
  const absl::string_view rest = datagram.substr(kHeadBytes);
  if (answer.code != AttachCode::kFenced) {
    answer.words = std::string(rest);
    return answer;
  }
  if (rest.size() != 8) return std::nullopt;
  answer.number = Read(rest, 0, 8);
  return answer;
}

}  // namespace ringattn
