// Encodes the datagrams between a client and a worker that share a region. Their semantics are in
// proto/ringattn/v1/local_memory.proto. Pure.
#ifndef RINGATTN_COMMON_LOCAL_MEMORY_ATTACH_PROTOCOL_H_
#define RINGATTN_COMMON_LOCAL_MEMORY_ATTACH_PROTOCOL_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "absl/strings/string_view.h"

namespace ringattn {

inline constexpr uint32_t kAttachVersion = 2;
inline constexpr size_t kAttachTokenBytes = 16;
inline constexpr size_t kDeviceUuidBytes = 16;
inline constexpr size_t kCudaIpcHandleBytes = 64;
// Maximum length of a datagram.
inline constexpr size_t kMaxAttachDatagramBytes = 512;

// The kind of memory of a region.
enum class MemoryKind : uint32_t {
  kHostMemfd = 1,
  kCudaVmm = 2,  // from cuMemCreate, shared as a descriptor
  kCudaIpc = 3,  // from cudaMalloc, shared as a CUDA IPC handle
};

// The code in a worker's response.
enum class AttachCode : uint32_t {
  kAttached = 0,
  kNotUnderstood = 1,
  kNoSuchToken = 2,
  kDescriptorRefused = 3,
  kCannotMap = 4,
  kForeignUser = 5,
  kFenced = 6,
  kKindRefused = 7,
  kDeviceOutOfReach = 8,
  kTooMuch = 9,
};

// The GPU allocation that holds a region.
struct CudaAllocation {
  std::string device_uuid;  // kDeviceUuidBytes
  uint64_t bytes = 0;
  uint64_t offset = 0;  // of the region in the allocation
  // kCudaIpc only:
  uint32_t exporter_pid = 0;  // in the exporter's pid namespace
  std::string ipc_handle;     // kCudaIpcHandleBytes
};

// --- From the client.
struct AttachMessage {
  std::string token;
  MemoryKind memory = MemoryKind::kHostMemfd;
  CudaAllocation cuda = {};  // unless kHostMemfd
};
struct FenceMessage {
  uint64_t number = 0;
};
// An attach request with a kind of memory that this version does not support.
struct UnknownMemory {
  uint32_t kind = 0;
};
// A message of a client with another protocol version.
struct OtherVersion {
  uint32_t version = 0;
};
std::string Encode(const AttachMessage& message);
std::string Encode(const FenceMessage& message);
// Returns nullopt for any other datagram.
using ClientMessage = std::variant<AttachMessage, FenceMessage, UnknownMemory, OtherVersion>;
std::optional<ClientMessage> ReadClientMessage(absl::string_view datagram);

// --- From the worker.
struct WorkerAnswer {
  AttachCode code = AttachCode::kAttached;
  std::string detail;   // for people; truncated to fit
  uint64_t number = 0;  // kFenced
};
// `version`: other than the default only in a kNotUnderstood response to a client of that version.
std::string Encode(const WorkerAnswer& answer, uint32_t version = kAttachVersion);
// Accepts another version only in kNotUnderstood, which has the same form in all versions.
std::optional<WorkerAnswer> ReadWorkerAnswer(absl::string_view datagram);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_LOCAL_MEMORY_ATTACH_PROTOCOL_H_
