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

inline constexpr uint32_t kAttachVersion = 2;
inline constexpr size_t kAttachTokenBytes = 16;
inline constexpr size_t kDeviceUuidBytes = 16;
inline constexpr size_t kCudaIpcHandleBytes = 64;
// No datagram is longer.
inline constexpr size_t kMaxAttachDatagramBytes = 512;

// What a region lies in.
enum class MemoryKind : uint32_t {
  kHostMemfd = 1,
  kCudaVmm = 2,  // of cuMemCreate, as a descriptor
  kCudaIpc = 3,  // of cudaMalloc, as CUDA's handle
};

// A worker's answer.
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

// The allocation on a GPU in which a region lies.
struct CudaAllocation {
  std::string device_uuid;  // kDeviceUuidBytes
  uint64_t bytes = 0;
  uint64_t offset = 0;  // of the region
  // kCudaIpc alone:
  uint32_t exporter_pid = 0;  // as the exporter itself sees it
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
// An attach of a kind of memory that this version does not know.
struct UnknownMemory {
  uint32_t kind = 0;
};
// Of a client that speaks another version.
struct OtherVersion {
  uint32_t version = 0;
};
std::string Encode(const AttachMessage& message);
std::string Encode(const FenceMessage& message);
// Nothing of another form.
using ClientMessage = std::variant<AttachMessage, FenceMessage, UnknownMemory, OtherVersion>;
std::optional<ClientMessage> ReadClientMessage(absl::string_view datagram);

// --- From the worker.
struct WorkerAnswer {
  AttachCode code = AttachCode::kAttached;
  std::string words;    // for people; cut to fit
  uint64_t number = 0;  // kFenced
};
// `version`: another one only for who speaks no other, and then kNotUnderstood alone.
std::string Encode(const WorkerAnswer& answer, uint32_t version = kAttachVersion);
// Of another version only kNotUnderstood, whose form all have.
std::optional<WorkerAnswer> ReadWorkerAnswer(absl::string_view datagram);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_LOCAL_MEMORY_ATTACH_PROTOCOL_H_
