// A prepared forward or backward call: its kernel is chosen and its tables are laid out on the
// host. The Prepare functions of every family return one.
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

// The addresses of a launch that are not operands of the call.
struct TableLaunch {
  cudaStream_t stream = nullptr;
  const void* tables = nullptr;  // device, as WriteTables wrote them, 256-byte aligned
  void* scratch = nullptr;       // device, 256-byte aligned, in use until the work has run
  // Device-visible (device or mapped pinned) word, may be null. Thread blocks
  // that start while it is nonzero do nothing; outputs are then unspecified.
  const uint32_t* stop_word = nullptr;
  // Late keys (KvBlock::late) may not have arrived: the kernel waits for the word at
  // keys_word_offset() before it reads them. The waiting kernel may occupy all SMs, so the work
  // that brings the keys and writes the word must not need an SM. REQUIRES: keys_word_offset() has
  // a value.
  bool awaits_keys = false;
};

// Immutable except for PlaceScratch and DropTables. Launch is thread safe. Launches with the same
// tables run one after another, because sm90 keeps counters in the tables.
class PreparedKernel {
 public:
  // Both are literals. An empty family means that the kernel does not multiply q by k.
  explicit PreparedKernel(std::string_view family,
                          std::string_view kernel_class = kPlainKernelClass)
      : family_(family), kernel_class_(kernel_class) {}
  virtual ~PreparedKernel() = default;
  PreparedKernel(const PreparedKernel&) = delete;
  PreparedKernel& operator=(const PreparedKernel&) = delete;

  // Name of the kernel's family (family.h).
  std::string_view family() const { return family_; }
  KernelName name() const {
    return family_.empty() ? KernelName() : KernelName{family_, kernel_class_, {}};
  }
  int64_t table_bytes() const { return table_bytes_; }
  int64_t scratch_bytes() const { return scratch_bytes_; }

  // Sets the scratch address of every launch (TableLaunch, device memory), for tables that contain
  // it. Call it before WriteTables. Returns INTERNAL with CUDA's text if the driver rejects a
  // tensor map of the scratch.
  virtual absl::Status PlaceScratch(void* scratch) { return absl::OkStatus(); }
  virtual void WriteTables(void* target) const = 0;
  // Whether launches store KvBlock::dk_out and dv_out instead of adding to dk and dv.
  virtual bool stores_key_gradients() const { return false; }
  // Whether a launch may overlap other such launches that add to the same sums. REQUIRES: it has no
  // scratch memory.
  virtual bool adds_atomically() const { return false; }

  // Offset in the tables of the word that signals the arrival of late keys: before a launch that
  // awaits its keys reads a block, it waits until the word is at least KvBlock::late. The word is 0
  // before the first launch. Each launch that awaits keys resets it to 0, unless it was stopped. No
  // value: the kernel does not wait.
  virtual std::optional<int64_t> keys_word_offset() const { return std::nullopt; }

  // Frees the host's copy of the tables. Afterwards only Launch may be called.
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
