// ImportedMemory: GPU memory that another process has allocated, mapped into this process.
#ifndef RINGATTN_WORKER_DEVICE_IMPORTED_MEMORY_H_
#define RINGATTN_WORKER_DEVICE_IMPORTED_MEMORY_H_

#include <cstdint>
#include <string>

namespace ringattn::worker {

// An allocation of another process, as described by that process.
struct SharedAllocation {
  // From cuMemExportToShareableHandle; stays owned by the caller. Negative: use ipc_handle.
  int descriptor = -1;
  std::string ipc_handle = {};  // cudaIpcMemHandle_t
  uint32_t exporter_pid = 0;    // with ipc_handle: the exporter's process id in its own namespace
  std::string device_uuid = {};
  int64_t bytes = 0;
};

// Unmapped on destruction. Until then the GPU counts the memory as used, even after its owner has
// freed it. REQUIRES on destruction: no copy from or to it is in flight.
class ImportedMemory {
 public:
  ImportedMemory() = default;
  virtual ~ImportedMemory() = default;
  ImportedMemory(const ImportedMemory&) = delete;
  ImportedMemory& operator=(const ImportedMemory&) = delete;

  // Returns the address of the first byte, for copies of the device that imported it.
  virtual uint8_t* data() const = 0;
};

// One piece of a copy between device memory and imported memory.
struct DeviceCopy {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t bytes = 0;
};

enum class ImportedCopy : uint8_t { kIn, kOut };  // from imported memory; into it

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_IMPORTED_MEMORY_H_
