// PeerSegment: host memory that one rank shares with the other ranks of its ring on the same
// machine. A rank waits only for words of its own segment, which the others write. It can therefore
// end its own waits without affecting other ranks.
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

// A send that a rank has posted: where its bytes are, or will be, in the sender's memory.
struct PostedSend {
  int32_t region = 0;      // index in the sender's table
  int32_t ends_group = 0;  // 1: the sender waits until this send is pulled
  int64_t offset = 0;
  int64_t bytes = 0;
};

// A region of a rank's memory, as others can map it.
struct PeerRegion {
  uint64_t base = 0;  // in the rank's own address space
  int64_t bytes = 0;
  char ipc_handle[64] =
      {};  // cudaIpcMemHandle_t; all zero: the rank's HandleServer has a descriptor
};

// Regions grow by half of their total, so this suffices for any device.
inline constexpr int kMaxPeerRegions = 256;

// How many sends a rank may post to another one before it takes them.
inline constexpr uint64_t kPostedSends = 1024;

// The entries of rank r's segment for peer p. Transfers between two ranks are numbered from 1 in
// each direction. Stream operations write the words "by a device".
struct PeerLane {
  // By p's device: the bytes of p's sends to r are in place, up to this number.
  alignas(64) uint64_t ready;
  // By p's device: p has copied r's sends to p, up to this number (written at a group's end).
  alignas(64) uint64_t pulled;
  // By r's device: r has copied p's sends to r, up to this number.
  alignas(64) uint64_t received;
  // By p: p's sends to r have been posted below, up to this number.
  alignas(64) std::atomic<uint64_t> posted;
  // By r: posted sends have been read, up to this number.
  alignas(64) std::atomic<uint64_t> taken;
  alignas(64) PostedSend sends[kPostedSends];  // n at n % kPostedSends
};

class PeerSegment {
 public:
  // Creates this rank's segment, all zero, with a lane for each of world_size ranks. It exists as
  // long as it is mapped anywhere. Returns RESOURCE_EXHAUSTED if memory is short.
  static absl::StatusOr<std::unique_ptr<PeerSegment>> Create(uint64_t generation, int rank,
                                                             int world_size);
  // Maps another rank's segment by its path(). Returns UNAVAILABLE if it does not exist any more,
  // or FAILED_PRECONDITION if it may not be opened.
  static absl::StatusOr<std::unique_ptr<PeerSegment>> Open(const std::string& path,
                                                           uint64_t generation, int rank,
                                                           int world_size);
  // Maps the segment that another rank's HandleServer returned.
  static absl::StatusOr<std::unique_ptr<PeerSegment>> Adopt(ScopedDescriptor descriptor,
                                                            uint64_t generation, int rank,
                                                            int world_size);
  ~PeerSegment();
  PeerSegment(const PeerSegment&) = delete;
  PeerSegment& operator=(const PeerSegment&) = delete;

  // Path under which processes of the same user and PID namespace can open the segment while this
  // object exists. Empty if it was adopted.
  const std::string& path() const { return path_; }
  // For other processes to map; open while this object exists.
  int descriptor() const { return descriptor_.get(); }

  // Makes the words accessible for the current device. Returns FAILED_PRECONDITION if CUDA rejects
  // it.
  absl::Status Register();

  PeerLane& lane(int peer) { return lanes_[peer]; }

  // The owner's table of regions, which only grows to region_count() entries. Only the owner calls
  // AddRegion, on one thread; it returns RESOURCE_EXHAUSTED if the table is full.
  absl::Status AddRegion(const PeerRegion& region);
  int region_count() const;
  // REQUIRES: index < region_count().
  PeerRegion region(int index) const;
  // Returns the device address of a word of this segment. REQUIRES: registered.
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
