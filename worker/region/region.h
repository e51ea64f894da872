// Region: a client's memory, of the host or of a GPU, mapped into this process.
#ifndef RINGATTN_WORKER_REGION_REGION_H_
#define RINGATTN_WORKER_REGION_REGION_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "worker/device/host_pin.h"
#include "worker/device/imported_memory.h"

namespace ringattn::worker {

// Shared by the connection it came over and the copies that use it; unmapped with the last of
// them. The client can write to it at any time: whatever is read of it is a tensor's bytes and
// is never looked at. Thread safe.
class Region {
 public:
  // Maps the first `bytes` of a descriptor that CheckRegionDescriptor took; `fd` may be closed
  // afterwards. RESOURCE_EXHAUSTED if it cannot be mapped. REQUIRES: bytes >= 1.
  static absl::StatusOr<std::shared_ptr<Region>> Map(std::string id, int fd, int64_t bytes);
  // [offset, offset + bytes) of an allocation on a GPU.
  static std::shared_ptr<Region> OfDevice(std::string id, std::unique_ptr<ImportedMemory> memory,
                                          int64_t offset, int64_t bytes);
  ~Region();

  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const std::string& id() const { return id_; }
  // Of a device: nothing that this process itself may read or write.
  uint8_t* data() const { return data_; }
  bool on_device() const { return imported_ != nullptr; }
  int64_t bytes() const { return bytes_; }

  // The client has let go of it, or is gone: no new use, and what is in use ends.
  void Release() { released_.store(true); }
  bool released() const { return released_.load(); }

  // Makes the pages of [offset, offset + bytes) known to this process, so that the first copy
  // does not take the faults. Only a hint.
  void Populate(int64_t offset, int64_t bytes) const;

  // --- Pinned memory. A device's copies reach what is pinned by themselves; it is pinned piece by
  // piece from the front, each of kPinBytes but the last, and copies stay within a piece.
  static constexpr int64_t kPinBytes = int64_t{64} << 20;
  // REQUIRES: pins come in the order of their pieces, from one thread.
  void AddPin(std::unique_ptr<HostPin> pin) ABSL_LOCKS_EXCLUDED(mutex_);
  // The first bytes of the region, so many.
  int64_t pinned_bytes() const { return pinned_bytes_.load(std::memory_order_acquire); }

  // --- Writing. Between the two a piece may be written for the stream of this number; pieces
  // are short, a fence waits for them. False: no more for this stream.
  bool BeginWrite(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);
  void EndWrite(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);
  // From its return on nothing is written for `number`, ever. Waits for pieces being written.
  void Fence(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // A stream that was fenced is over and its operation goes within seconds; later numbers of a
  // client that fences like mad push earlier ones out.
  static constexpr size_t kMaxFences = 4096;

  Region(std::string id, std::unique_ptr<ImportedMemory> imported, uint8_t* data, int64_t bytes)
      : id_(std::move(id)), imported_(std::move(imported)), data_(data), bytes_(bytes) {}

  const std::string id_;
  const std::unique_ptr<ImportedMemory> imported_;  // null of host memory
  uint8_t* const data_;
  const int64_t bytes_;
  std::atomic<bool> released_{false};
  std::atomic<int64_t> pinned_bytes_{0};

  absl::Mutex mutex_;
  std::vector<std::unique_ptr<HostPin>> pins_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, int> writing_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> fenced_ ABSL_GUARDED_BY(mutex_);
  std::deque<uint64_t> fences_ ABSL_GUARDED_BY(mutex_);  // fenced_, in order
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_REGION_H_
