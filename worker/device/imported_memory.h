// ImportedMemory: memory of a GPU that another process has allocated, mapped into this one.
#ifndef RINGATTN_WORKER_DEVICE_IMPORTED_MEMORY_H_
#define RINGATTN_WORKER_DEVICE_IMPORTED_MEMORY_H_

#include <cstdint>
#include <string>

namespace ringattn::worker {

// An allocation of another process, as it says itself.
struct SharedAllocation {
  // Of cuMemExportToShareableHandle; stays the caller's. Negative: ipc_handle has the memory.
  int descriptor = -1;
  std::string ipc_handle = {};  // cudaIpcMemHandle_t
  uint32_t exporter_pid = 0;    // with ipc_handle: the process's own number for itself
  std::string device_uuid = {};
  int64_t bytes = 0;
};

// Unmapped and given back on destruction: until then the GPU counts the memory as used, whatever
// its owner does. REQUIRES on destruction: no copy from or to it is under way.
class ImportedMemory {
 public:
  ImportedMemory() = default;
  virtual ~ImportedMemory() = default;
  ImportedMemory(const ImportedMemory&) = delete;
  ImportedMemory& operator=(const ImportedMemory&) = delete;

  // The allocation's first byte, for copies of the device that imported it.
  virtual uint8_t* data() const = 0;
};

// One of the pieces of a copy between a device's memory and what it has imported.
struct DeviceCopy {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t bytes = 0;
};

enum class ImportedCopy : uint8_t { kIn, kOut };  // from imported memory; into it

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_IMPORTED_MEMORY_H_
