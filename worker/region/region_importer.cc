#include "worker/region/region_importer.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn::worker {

class RegionImporter::Budget {
 public:
  Budget(int64_t max_bytes, std::function<void(int64_t)> on_imported)
      : max_bytes_(max_bytes), on_imported_(std::move(on_imported)) {}

  bool Take(int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (bytes > max_bytes_ - bytes_) return false;
    Change(bytes);
    return true;
  }
  void Give(int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    Change(-bytes);
  }
  // The owner of the metric is being destroyed.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    on_imported_ = nullptr;
  }
  int64_t bytes() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return bytes_;
  }

 private:
  void Change(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    bytes_ += bytes;
    if (on_imported_) on_imported_(bytes_);
  }

  const int64_t max_bytes_;
  mutable absl::Mutex mutex_;
  std::function<void(int64_t)> on_imported_ ABSL_GUARDED_BY(mutex_);
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

class RegionImporter::Counted final : public ImportedMemory {
 public:
  Counted(std::unique_ptr<ImportedMemory> memory, int64_t bytes, std::shared_ptr<Budget> budget)
      : memory_(std::move(memory)), bytes_(bytes), budget_(std::move(budget)) {}
  ~Counted() override {
    memory_.reset();
    budget_->Give(bytes_);
  }
  uint8_t* data() const override { return memory_->data(); }

 private:
  std::unique_ptr<ImportedMemory> memory_;
  const int64_t bytes_;
  const std::shared_ptr<Budget> budget_;
};

bool RegionImporter::Import::is_done() const {
  absl::MutexLock lock(&mutex_);
  return is_done_;
}

absl::StatusOr<std::shared_ptr<Region>> RegionImporter::Import::Take() {
  absl::MutexLock lock(&mutex_);
  return std::exchange(result_, absl::UnknownError("taken"));
}

RegionImporter::RegionImporter(Device* device, int64_t max_bytes, std::function<void()> on_done,
                               std::function<void(int64_t bytes)> on_imported)
    : device_(device),
      on_done_(std::move(on_done)),
      budget_(std::make_shared<Budget>(max_bytes, std::move(on_imported))) {
  thread_ = std::thread([this] { Run(); });
}

RegionImporter::~RegionImporter() {
  std::deque<Job> forgotten;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    forgotten.swap(jobs_);
  }
  thread_.join();
  budget_->Close();
}

int64_t RegionImporter::imported_bytes() const { return budget_->bytes(); }

std::shared_ptr<RegionImporter::Import> RegionImporter::Start(std::string region_id, int64_t bytes,
                                                              CudaAllocation allocation,
                                                              ScopedDescriptor descriptor) {
  auto import = std::make_shared<Import>();
  absl::MutexLock lock(&mutex_);
  jobs_.push_back(
      {import, std::move(region_id), bytes, std::move(allocation), std::move(descriptor)});
  return import;
}

void RegionImporter::Run() {
  const auto has_work = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !jobs_.empty();
  };
  while (true) {
    Job job;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_work));
      if (stopping_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    // The connection has been closed, so nothing needs to be mapped.
    if (job.import.expired()) continue;
    absl::StatusOr<std::shared_ptr<Region>> result = Do(job);
    job.descriptor.Close();  // before the result is published
    const std::shared_ptr<Import> import = job.import.lock();
    if (import == nullptr) continue;
    {
      absl::MutexLock lock(&import->mutex_);
      import->result_ = std::move(result);
      import->is_done_ = true;
    }
    on_done_();
  }
}

absl::StatusOr<std::shared_ptr<Region>> RegionImporter::Do(const Job& job) {
  const CudaAllocation& stated = job.allocation;
  const auto bytes = static_cast<uint64_t>(job.bytes);
  if (stated.bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ||
      bytes > stated.bytes || stated.offset > stated.bytes - bytes) {
    return absl::InvalidArgumentError(absl::StrCat("the region's ", bytes, " bytes at offset ",
                                                   stated.offset, " are not within the ",
                                                   stated.bytes, " of its allocation"));
  }
  const auto allocated = static_cast<int64_t>(stated.bytes);
  if (!budget_->Take(allocated)) {
    return absl::OutOfRangeError(absl::StrCat(
        "the limit of imported CUDA memory is reached (--max_imported_memory): ", budget_->bytes(),
        " bytes are imported, and ", allocated, " more were requested"));
  }
  absl::StatusOr<std::unique_ptr<ImportedMemory>> memory =
      device_->ImportMemory({.descriptor = job.descriptor.get(),
                             .ipc_handle = stated.ipc_handle,
                             .exporter_pid = stated.exporter_pid,
                             .device_uuid = stated.device_uuid,
                             .bytes = allocated});
  if (!memory.ok()) {
    budget_->Give(allocated);
    return memory.status();
  }
  return Region::OfDevice(job.region_id,
                          std::make_unique<Counted>(*std::move(memory), allocated, budget_),
                          static_cast<int64_t>(stated.offset), job.bytes);
}

}  // namespace ringattn::worker
