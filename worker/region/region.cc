#include "worker/region/region.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace ringattn::worker {

absl::StatusOr<std::shared_ptr<Region>> Region::Map(std::string id, int fd, int64_t bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot map ", bytes, " bytes: ", std::strerror(errno)));
  }
  // Excludes clients' tensors from core dumps of the worker.
  madvise(data, bytes, MADV_DONTDUMP);
  return std::shared_ptr<Region>(
      new Region(std::move(id), nullptr, static_cast<uint8_t*>(data), bytes));
}

std::shared_ptr<Region> Region::OfDevice(std::string id, std::unique_ptr<ImportedMemory> memory,
                                         int64_t offset, int64_t bytes) {
  uint8_t* const data = memory->data() + offset;
  return std::shared_ptr<Region>(new Region(std::move(id), std::move(memory), data, bytes));
}

Region::~Region() {
  {
    absl::MutexLock lock(&mutex_);
    pins_.clear();
  }
  if (!on_device()) munmap(data_, bytes_);
}

void Region::AddPin(std::unique_ptr<HostPin> pin) {
  absl::MutexLock lock(&mutex_);
  pins_.push_back(std::move(pin));
  const int64_t pinned = kPinBytes * static_cast<int64_t>(pins_.size());
  pinned_bytes_.store(std::min(pinned, bytes_), std::memory_order_release);
}

void Region::Populate(int64_t offset, int64_t bytes) const {
  if (offset < bytes_)
    madvise(data_ + offset, std::min(bytes, bytes_ - offset), MADV_POPULATE_WRITE);
}

bool Region::BeginWrite(uint64_t number) {
  absl::MutexLock lock(&mutex_);
  if (released() || fenced_.count(number) > 0) return false;
  ++writing_[number];
  return true;
}

void Region::EndWrite(uint64_t number) {
  absl::MutexLock lock(&mutex_);
  const auto writing = writing_.find(number);
  if (--writing->second == 0) writing_.erase(writing);
}

void Region::Fence(uint64_t number) {
  const auto quiet = [&]()
                         ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return writing_.count(number) == 0; };
  absl::MutexLock lock(&mutex_);
  if (fenced_.insert(number).second) fences_.push_back(number);
  if (fences_.size() > kMaxFences) {
    fenced_.erase(fences_.front());
    fences_.pop_front();
  }
  mutex_.Await(absl::Condition(&quiet));
}

}  // namespace ringattn::worker
