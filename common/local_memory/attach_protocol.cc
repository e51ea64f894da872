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

// REQUIRES: `from` has that many bytes at `at`.
uint64_t Read(absl::string_view from, size_t at, int bytes) {
  uint64_t value = 0;
  for (int i = bytes - 1; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(from[at + i]);
  return value;
}

std::string Head(uint32_t second, uint32_t version = kAttachVersion) {
  std::string bytes;
  Append32(version, &bytes);
  Append32(second, &bytes);
  return bytes;
}

constexpr size_t kAllocationBytes = kDeviceUuidBytes + 8 + 8;

// `rest`: the bytes after the kind of memory.
std::optional<CudaAllocation> ReadAllocation(absl::string_view rest, bool by_ipc) {
  const size_t handle_at = kAllocationBytes + 4;
  if (rest.size() != (by_ipc ? handle_at + kCudaIpcHandleBytes : kAllocationBytes)) {
    return std::nullopt;
  }
  CudaAllocation allocation;
  allocation.device_uuid = std::string(rest.substr(0, kDeviceUuidBytes));
  allocation.bytes = Read(rest, kDeviceUuidBytes, 8);
  allocation.offset = Read(rest, kDeviceUuidBytes + 8, 8);
  if (by_ipc) {
    allocation.exporter_pid = static_cast<uint32_t>(Read(rest, kAllocationBytes, 4));
    allocation.ipc_handle = std::string(rest.substr(handle_at));
  }
  return allocation;
}

std::optional<ClientMessage> ReadAttach(absl::string_view rest) {
  constexpr size_t kMemoryAt = kAttachTokenBytes;
  if (rest.size() < kMemoryAt + 4) return std::nullopt;
  const auto memory = static_cast<uint32_t>(Read(rest, kMemoryAt, 4));
  const absl::string_view more = rest.substr(kMemoryAt + 4);
  AttachMessage message{std::string(rest.substr(0, kAttachTokenBytes)),
                        static_cast<MemoryKind>(memory)};
  switch (message.memory) {
    case MemoryKind::kHostMemfd:
      if (!more.empty()) return std::nullopt;
      return message;
    case MemoryKind::kCudaVmm:
    case MemoryKind::kCudaIpc: {
      auto allocation = ReadAllocation(more, message.memory == MemoryKind::kCudaIpc);
      if (!allocation.has_value()) return std::nullopt;
      message.cuda = *std::move(allocation);
      return message;
    }
  }
  return UnknownMemory{memory};
}

}  // namespace

std::string Encode(const AttachMessage& message) {
  std::string bytes = Head(kAttach) + message.token;
  Append32(static_cast<uint32_t>(message.memory), &bytes);
  if (message.memory == MemoryKind::kHostMemfd) return bytes;
  bytes += message.cuda.device_uuid;
  Append64(message.cuda.bytes, &bytes);
  Append64(message.cuda.offset, &bytes);
  if (message.memory == MemoryKind::kCudaVmm) return bytes;
  Append32(message.cuda.exporter_pid, &bytes);
  return bytes + message.cuda.ipc_handle;
}

std::string Encode(const FenceMessage& message) {
  std::string bytes = Head(kFence);
  Append64(message.number, &bytes);
  return bytes;
}

std::optional<ClientMessage> ReadClientMessage(absl::string_view datagram) {
  if (datagram.size() < kHeadBytes) return std::nullopt;
  const auto version = static_cast<uint32_t>(Read(datagram, 0, 4));
  if (version != kAttachVersion) return OtherVersion{version};
  const uint64_t kind = Read(datagram, 4, 4);
  const absl::string_view rest = datagram.substr(kHeadBytes);
  if (kind == kAttach) return ReadAttach(rest);
  if (kind == kFence && rest.size() == 8) return FenceMessage{Read(rest, 0, 8)};
  return std::nullopt;
}

std::string Encode(const WorkerAnswer& answer, uint32_t version) {
  std::string bytes = Head(static_cast<uint32_t>(answer.code), version);
  if (answer.code == AttachCode::kFenced) {
    Append64(answer.number, &bytes);
  } else {
    bytes.append(answer.detail, 0, kMaxAttachDatagramBytes - kHeadBytes);
  }
  return bytes;
}

std::optional<WorkerAnswer> ReadWorkerAnswer(absl::string_view datagram) {
  if (datagram.size() < kHeadBytes) return std::nullopt;
  const uint64_t code = Read(datagram, 4, 4);
  const bool is_known = Read(datagram, 0, 4) == kAttachVersion
                            ? code <= static_cast<uint64_t>(AttachCode::kTooMuch)
                            : code == static_cast<uint64_t>(AttachCode::kNotUnderstood);
  if (!is_known) return std::nullopt;
  WorkerAnswer answer;
  answer.code = static_cast<AttachCode>(code);
  const absl::string_view rest = datagram.substr(kHeadBytes);
  if (answer.code != AttachCode::kFenced) {
    answer.detail = std::string(rest);
    return answer;
  }
  if (rest.size() != 8) return std::nullopt;
  answer.number = Read(rest, 0, 8);
  return answer;
}

}  // namespace ringattn
