// Region: a client's host or GPU memory, mapped into this process.
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

// Thread safe. Shared by its connection and the copies that use it; the last owner unmaps it. The
// client can write to it at any time, so the worker never interprets its bytes in place: it copies
// tensors, and it copies the messages of a step ring before it reads them.
class Region {
 public:
  // Maps the first `bytes` of a descriptor that CheckRegionDescriptor accepted. The caller may
  // close `fd` afterwards. Returns RESOURCE_EXHAUSTED if the memory cannot be mapped. REQUIRES:
  // bytes >= 1.
  static absl::StatusOr<std::shared_ptr<Region>> Map(std::string id, int fd, int64_t bytes);
  // Makes a region of bytes [offset, offset + bytes) of a GPU allocation.
  static std::shared_ptr<Region> OfDevice(std::string id, std::unique_ptr<ImportedMemory> memory,
                                          int64_t offset, int64_t bytes);
  ~Region();

  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const std::string& id() const { return id_; }
  // For GPU memory, the CPU must not access these addresses.
  uint8_t* data() const { return data_; }
  bool on_device() const { return imported_ != nullptr; }
  int64_t bytes() const { return bytes_; }

  // The client has released the region or is gone: rejects new uses and ends current ones.
  void Release() { released_.store(true); }
  bool released() const { return released_.load(); }

  // Maps the pages of [offset, offset + bytes) ahead of the first copy, which then takes no page
  // faults. Only a hint.
  void Populate(int64_t offset, int64_t bytes) const;

  // --- Pinned memory. The device's copy engines access pinned memory directly. Pinning proceeds
  // from the front in pieces of kPinBytes (the last may be shorter). A copy must stay within one
  // piece.
  // piece from the front, each of kPinBytes but the last, and copies stay within a piece.
  static constexpr int64_t kPinBytes = int64_t{64} << 20;
  // REQUIRES: called in the order of the pieces, by one thread.
  void AddPin(std::unique_ptr<HostPin> pin) ABSL_LOCKS_EXCLUDED(mutex_);
  // The length of the pinned prefix of the region.
  int64_t pinned_bytes() const { return pinned_bytes_.load(std::memory_order_acquire); }

  // --- Writing. A writer brackets each write for stream `number` with BeginWrite and EndWrite.
  // Writes must be short, because a fence waits for them. BeginWrite returns false if the stream
  // may not write any more.
  // are short, a fence waits for them. False: no more for this stream.
  bool BeginWrite(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);
  void EndWrite(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);
  // After this returns, nothing is written for stream `number`. Waits for writes in progress.
  void Fence(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // The operation of a fenced stream ends within seconds. Only a client that fences extremely often
  // reaches this limit, and then loses its own earliest fences.
  static constexpr size_t kMaxFences = 4096;

  Region(std::string id, std::unique_ptr<ImportedMemory> imported, uint8_t* data, int64_t bytes)
      : id_(std::move(id)), imported_(std::move(imported)), data_(data), bytes_(bytes) {}

  const std::string id_;
  const std::unique_ptr<ImportedMemory> imported_;  // null for host memory
  uint8_t* const data_;
  const int64_t bytes_;
  std::atomic<bool> released_{false};
  std::atomic<int64_t> pinned_bytes_{0};

  absl::Mutex mutex_;
  std::vector<std::unique_ptr<HostPin>> pins_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, int> writing_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> fenced_ ABSL_GUARDED_BY(mutex_);
  std::deque<uint64_t> fences_ ABSL_GUARDED_BY(mutex_);  // fenced_, in the order of arrival
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_REGION_H_
