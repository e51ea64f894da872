// The datagrams between a client and a worker that share a region, in bytes. What they mean
// is written down in proto/ringattn/v1/local_memory.proto. Pure.
#ifndef RINGATTN_COMMON_LOCAL_MEMORY_ATTACH_PROTOCOL_H_
#define RINGATTN_COMMON_LOCAL_MEMORY_ATTACH_PROTOCOL_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "absl/strings/string_view.h"

namespace ringattn {

inline constexpr uint32_t kAttachVersion = 1;
inline constexpr size_t kAttachTokenBytes = 16;
// No datagram is longer.
inline constexpr size_t kMaxAttachDatagramBytes = 512;

// A worker's answer.
enum class AttachCode : uint32_t {
  kAttached = 0,
  kNotUnderstood = 1,
  kNoSuchToken = 2,
  kDescriptorRefused = 3,
  kCannotMap = 4,
  kForeignUser = 5,
  kFenced = 6,
};

// --- From the client.
struct AttachMessage {
  std::string token;
};
struct FenceMessage {
  uint64_t number = 0;
};
std::string Encode(const AttachMessage& message);
std::string Encode(const FenceMessage& message);
// Nothing of another version or form.
using ClientMessage = std::variant<AttachMessage, FenceMessage>;
std::optional<ClientMessage> ReadClientMessage(absl::string_view datagram);

// --- From the worker.
struct WorkerAnswer {
  AttachCode code = AttachCode::kAttached;
  std::string words;    // for people; cut to fit
  uint64_t number = 0;  // kFenced
};
std::string Encode(const WorkerAnswer& answer);
std::optional<WorkerAnswer> ReadWorkerAnswer(absl::string_view datagram);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_LOCAL_MEMORY_ATTACH_PROTOCOL_H_
