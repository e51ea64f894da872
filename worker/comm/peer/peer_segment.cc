#include "worker/comm/peer/peer_segment.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {
namespace {

constexpr uint64_t kMagic = 0x72696e6761747431;  // includes the layout's version
// The size is fixed, so that no process can remove pages that others have mapped.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::string LastError() { return std::strerror(errno); }

static_assert(std::is_standard_layout_v<PeerLane>);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace

// The beginning of the file; lanes follow.
struct alignas(64) PeerSegment::Head {
  uint64_t magic;
  uint64_t generation;
  int64_t rank;
  int64_t world_size;
  std::atomic<uint64_t> region_count;
  PeerRegion regions[kMaxPeerRegions];

  static int64_t SegmentBytes(int world_size) {
    return static_cast<int64_t>(sizeof(Head)) + world_size * static_cast<int64_t>(sizeof(PeerLane));
  }
};

absl::StatusOr<std::unique_ptr<PeerSegment>> PeerSegment::Create(uint64_t generation, int rank,
                                                                 int world_size) {
  const int64_t bytes = Head::SegmentBytes(world_size);
  const int descriptor = memfd_create("ringattn-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) {
    return absl::ResourceExhaustedError(absl::StrCat("memfd_create: ", LastError()));
  }
  std::unique_ptr<PeerSegment> segment(new PeerSegment(ScopedDescriptor(descriptor), bytes));
  if (ftruncate(descriptor, bytes) != 0 || fcntl(descriptor, F_ADD_SEALS, kSeals) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("shared memory of ", bytes, " bytes: ", LastError()));
  }
  if (absl::Status status = segment->Map(); !status.ok()) return status;
  Head& head = *segment->head_;  // all zero so far
  head.magic = kMagic;
  head.generation = generation;
  head.rank = rank;
  head.world_size = world_size;
  segment->path_ = absl::StrCat("/proc/", getpid(), "/fd/", descriptor);
  return segment;
}

absl::StatusOr<std::unique_ptr<PeerSegment>> PeerSegment::Open(const std::string& path,
                                                               uint64_t generation, int rank,
                                                               int world_size) {
  ScopedDescriptor descriptor(open(path.c_str(), O_RDWR | O_CLOEXEC));
  const std::string where = absl::StrCat("shared memory of rank ", rank, " at ", path, ": ");
  if (!descriptor.valid()) {
    // A socket that has reused the number cannot be opened either.
    const bool refused = errno == EACCES || errno == EPERM;
    const std::string why = absl::StrCat(where, LastError());
    return refused ? absl::FailedPreconditionError(why) : absl::UnavailableError(why);
  }
  absl::StatusOr<std::unique_ptr<PeerSegment>> segment =
      Adopt(std::move(descriptor), generation, rank, world_size);
  if (segment.ok()) (*segment)->path_ = path;
  return segment;
}

absl::StatusOr<std::unique_ptr<PeerSegment>> PeerSegment::Adopt(ScopedDescriptor descriptor,
                                                                uint64_t generation, int rank,
                                                                int world_size) {
  // The segment is gone or belongs to another ring: the rank has left this ring.
  const auto gone = [rank](const std::string& why) {
    return absl::UnavailableError(absl::StrCat("shared memory of rank ", rank, ": ", why));
  };
  const int64_t bytes = Head::SegmentBytes(world_size);
  const int fd = descriptor.get();
  std::unique_ptr<PeerSegment> segment(new PeerSegment(std::move(descriptor), bytes));
  struct stat info {};
  if (fstat(fd, &info) != 0 || info.st_size != bytes || fcntl(fd, F_GET_SEALS) != kSeals) {
    return gone("not a segment of a ring");
  }
  if (absl::Status status = segment->Map(); !status.ok()) return status;
  const Head& head = *segment->head_;
  if (head.magic != kMagic || head.generation != generation || head.rank != rank ||
      head.world_size != world_size) {
    return gone("not a segment of this ring");
  }
  return segment;
}

absl::Status PeerSegment::Map() {
  void* base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_.get(), 0);
  if (base == MAP_FAILED) return absl::ResourceExhaustedError(absl::StrCat("mmap: ", LastError()));
  base_ = static_cast<char*>(base);
  head_ = reinterpret_cast<Head*>(base_);
  static_assert(sizeof(Head) % alignof(PeerLane) == 0);
  lanes_ = reinterpret_cast<PeerLane*>(base_ + sizeof(Head));
  return absl::OkStatus();
}

PeerSegment::~PeerSegment() {
  if (device_base_ != nullptr) (void)cudaHostUnregister(base_);
  if (base_ != nullptr) munmap(base_, bytes_);
}

absl::Status PeerSegment::Register() {
  absl::Status status =
      CudaStatus(cudaHostRegister(base_, bytes_, cudaHostRegisterMapped), "cudaHostRegister");
  void* on_device = nullptr;
  if (status.ok()) {
    device_base_ = base_;  // unregistered on destruction even if what follows fails
    status = CudaStatus(cudaHostGetDevicePointer(&on_device, base_, 0), "cudaHostGetDevicePointer");
  }
  if (!status.ok()) return absl::FailedPreconditionError(status.message());
  device_base_ = static_cast<char*>(on_device);
  return absl::OkStatus();
}

absl::Status PeerSegment::AddRegion(const PeerRegion& region) {
  const uint64_t index = head_->region_count.load(std::memory_order_relaxed);
  if (index >= kMaxPeerRegions) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the device's memory has more than ", kMaxPeerRegions, " regions"));
  }
  head_->regions[index] = region;
  head_->region_count.store(index + 1, std::memory_order_release);
  return absl::OkStatus();
}

int PeerSegment::region_count() const {
  const uint64_t count = head_->region_count.load(std::memory_order_acquire);
  return static_cast<int>(std::min<uint64_t>(count, kMaxPeerRegions));
}

PeerRegion PeerSegment::region(int index) const { return head_->regions[index]; }

uint64_t* PeerSegment::OnDevice(uint64_t* word) const {
  return reinterpret_cast<uint64_t*>(device_base_ + (reinterpret_cast<char*>(word) - base_));
}

}  // namespace ringattn::worker
