// PeerSegment: memory of the host that one rank shares with the others of its ring, on
// the same machine. A rank waits for words of its own segment only, which the others
// write: so it can end its own waiting, and does nobody else's work by it.
#ifndef RINGATTN_WORKER_COMM_PEER_PEER_SEGMENT_H_
#define RINGATTN_WORKER_COMM_PEER_PEER_SEGMENT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/local_memory/scoped_descriptor.h"

namespace ringattn::worker {

// A send that a rank has started: where its bytes lie, or will, in the sender's memory.
struct PeerNotice {
  int32_t region = 0;      // number in the sender's table
  int32_t ends_group = 0;  // 1: the sender waits for this one to be pulled
  int64_t offset = 0;
  int64_t bytes = 0;
};

// A region of a rank's memory, as others can map it.
struct PeerRegion {
  uint64_t base = 0;  // in the rank's own address space
  int64_t bytes = 0;
  char ipc_handle[64] = {};  // cudaIpcMemHandle_t; all zero: the rank's door has a descriptor
};

// Regions grow by half of what there is: enough for any device.
inline constexpr int kMaxPeerRegions = 256;

// Sends that a rank may have announced to another which has not taken them up.
inline constexpr uint64_t kPeerNotices = 1024;

// What the segment of rank r holds about its peer p. Transfers between two ranks are
// numbered from 1 in each direction. "Device" words are written by stream operations.
struct PeerLane {
  // By p's device: p's sends to r up to this one have their bytes in place.
  alignas(64) uint64_t ready;
  // By p's device: p has copied r's sends to p up to this one (written at a group's end).
  alignas(64) uint64_t pulled;
  // By r's device: r has copied p's sends to r up to this one.
  alignas(64) uint64_t received;
  // By p: notices of p's sends to r up to this one are below.
  alignas(64) std::atomic<uint64_t> posted;
  // By r: those up to this one have been read.
  alignas(64) std::atomic<uint64_t> taken;
  alignas(64) PeerNotice notices[kPeerNotices];  // n at n % kPeerNotices
};

class PeerSegment {
 public:
  // Makes this rank's segment, all zero, with a lane for each of world_size ranks. It is
  // there as long as somebody has it mapped. RESOURCE_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<PeerSegment>> Create(uint64_t generation, int rank,
                                                             int world_size);
  // Maps another rank's segment by its path(). UNAVAILABLE if it is not there (any more);
  // FAILED_PRECONDITION if it may not be opened.
  static absl::StatusOr<std::unique_ptr<PeerSegment>> Open(const std::string& path,
                                                           uint64_t generation, int rank,
                                                           int world_size);
  // The same of what that rank's door gave.
  static absl::StatusOr<std::unique_ptr<PeerSegment>> Adopt(ScopedDescriptor descriptor,
                                                            uint64_t generation, int rank,
                                                            int world_size);
  ~PeerSegment();
  PeerSegment(const PeerSegment&) = delete;
  PeerSegment& operator=(const PeerSegment&) = delete;

  // Where other processes of the same user and PID namespace open it, while this process
  // lives and has it. Empty of one that was adopted.
  const std::string& path() const { return path_; }
  // What others can map; open while this lives.
  int descriptor() const { return descriptor_.get(); }

  // Makes the words reachable for the current device. FAILED_PRECONDITION if CUDA refuses.
  absl::Status Register();

  PeerLane& lane(int peer) { return lanes_[peer]; }

  // The owner's table of regions, which only grows: region_count() of them are there.
  // AddRegion is the owner's, on one thread; RESOURCE_EXHAUSTED if the table is full.
  absl::Status AddRegion(const PeerRegion& region);
  int region_count() const;
  // REQUIRES: index < region_count().
  PeerRegion region(int index) const;
  // The device's address of a word of this segment. REQUIRES: registered.
  uint64_t* OnDevice(uint64_t* word) const;

 private:
  PeerSegment(ScopedDescriptor descriptor, int64_t bytes)
      : descriptor_(std::move(descriptor)), bytes_(bytes) {}
  struct Head;

  absl::Status Map();

  const ScopedDescriptor descriptor_;
  const int64_t bytes_;
  std::string path_;
  char* base_ = nullptr;
  char* device_base_ = nullptr;  // null unless registered
  Head* head_ = nullptr;
  PeerLane* lanes_ = nullptr;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_PEER_PEER_SEGMENT_H_
