// A forward or backward call made ready: its kernel chosen, its tables laid out on the host. What
// every family's Prepare functions return.
//
//   kernel->PlaceScratch(scratch);
//   kernel->WriteTables(host);  // table_bytes(), copied to the device by the caller
//   kernel->DropTables();
//   kernel->Launch({stream, tables, scratch, stop_word});  // any number of times
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_PREPARED_KERNEL_H_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_PREPARED_KERNEL_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "worker/kernels/kernel_name.h"

namespace ringattn::worker::cuda {

// Where a launch finds what belongs to the call beside its operands.
struct TableLaunch {
  cudaStream_t stream = nullptr;
  const void* tables = nullptr;  // device, as WriteTables wrote them, 256-byte aligned
  void* scratch = nullptr;       // device, 256-byte aligned, in use until the work has run
  // Device-visible (device or mapped pinned) word, may be null. Thread blocks
  // that start while it is nonzero do nothing; outputs are then unspecified.
  const uint32_t* stop_word = nullptr;
  // Late keys (KvBlock::late) are not there yet: the kernel waits for the word of
  // keys_word_offset() before it reads them. It has all the SMs that it takes meanwhile, so what
  // brings the keys and writes the word must need none. REQUIRES: there is such a word.
  bool awaits_keys = false;
};

// Immutable but for PlaceScratch and DropTables. Launch is thread safe; launches with the same
// tables run one after another (sm90 counts in them).
class PreparedKernel {
 public:
  // Literals; no family: it does not multiply q by k.
  explicit PreparedKernel(std::string_view family,
                          std::string_view kernel_class = kPlainKernelClass)
      : family_(family), kernel_class_(kernel_class) {}
  virtual ~PreparedKernel() = default;
  PreparedKernel(const PreparedKernel&) = delete;
  PreparedKernel& operator=(const PreparedKernel&) = delete;

  // Name of the family whose kernel it is (family.h).
  std::string_view family() const { return family_; }
  KernelName name() const {
    return family_.empty() ? KernelName() : KernelName{family_, kernel_class_, {}};
  }
  int64_t table_bytes() const { return table_bytes_; }
  int64_t scratch_bytes() const { return scratch_bytes_; }

  // Before WriteTables: what every launch's scratch will be (TableLaunch), device. For tables that
  // name it. INTERNAL with CUDA's text if the driver refuses a tensor map of it.
  virtual absl::Status PlaceScratch(void* scratch) { return absl::OkStatus(); }
  virtual void WriteTables(void* target) const = 0;
  // Whether launches store KvBlock::dk_out and dv_out instead of adding to dk and dv.
  virtual bool stores_key_gradients() const { return false; }

  // Where in the tables lies the word that tells a launch which awaits them that its late keys are
  // there, by being 1. It is 0 before the first launch, and each launch that awaits keys leaves it
  // so, but for one that was stopped. None: the kernel does not wait.
  virtual std::optional<int64_t> keys_word_offset() const { return std::nullopt; }

  // Frees the host's copy: afterwards only Launch may be called.
  virtual void DropTables() = 0;
  // Asynchronous: ordered on the stream. Never allocates, never waits. The current device must
  // be the stream's. INTERNAL with CUDA's text if a launch fails.
  virtual absl::Status Launch(const TableLaunch& launch) const = 0;

 protected:
  int64_t table_bytes_ = 0;  // multiples of 256
  int64_t scratch_bytes_ = 0;

 private:
  const std::string_view family_;
  const std::string_view kernel_class_;
};

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_PREPARED_KERNEL_H_
