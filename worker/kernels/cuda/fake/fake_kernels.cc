// A family of kernels on the CPU's and the fake runtime's streams that replaces all others, for
// tests of CudaDevice without a GPU. A call's "table" is a number that must be in device memory
// before the call runs.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "worker/kernels/cpu/cpu_kernels.h"
#include "worker/kernels/cuda/cuda_kernels.h"
#include "worker/kernels/cuda/plan/stored_rows.h"
#include "worker/testing/fake_cuda/fake_cuda.h"

namespace ringattn::worker::cuda {
namespace {

constexpr std::string_view kName = "fake";
constexpr int64_t kTableBytes = 256;
constexpr int64_t kKeysWordOffset = 64;

void Compute(const KernelCall& call) {
  static auto* kernels = new CpuKernels(/*threads=*/1);
  std::atomic<bool> stop{false};
  std::atomic<int64_t> progress{0};
  if (!kernels->Run(call, stop, &progress).ok()) std::abort();
}

absl::Status Enqueue(KernelCall call, cudaStream_t stream) {
  FakeCudaEnqueue(stream, [call = std::move(call)] { Compute(call); });
  return absl::OkStatus();
}

int64_t NextNumber() {
  static std::atomic<int64_t> last{0};
  return ++last;
}

// As in Hopper's kernels: not with a softcap or a fixed order.
bool StoresKeyGradients(const KernelCall& call) {
  const auto* const backward = std::get_if<BackwardCall>(&call);
  if (backward == nullptr || backward->blocks.empty()) return false;
  const AttentionProblem& problem = *backward->problem;
  if (problem.softcap > 0 || problem.deterministic) return false;
  return std::all_of(backward->blocks.begin(), backward->blocks.end(), [](const KvBlock& block) {
    return block.dk_out != nullptr && block.dv_out != nullptr;
  });
}

// dk and dv are neither read nor written.
void ComputeAndStore(BackwardCall call) {
  const AttentionProblem& problem = *call.problem;
  struct Sums {
    std::vector<float> dk, dv;
  };
  std::vector<Sums> sums(call.blocks.size());
  for (size_t i = 0; i < sums.size(); ++i) {
    const int64_t heads = problem.batch * call.blocks[i].rows * problem.num_kv_heads;
    sums[i].dk.resize(heads * problem.head_dim);
    sums[i].dv.resize(heads * problem.head_dim_v);
    call.blocks[i].dk = sums[i].dk.data();
    call.blocks[i].dv = sums[i].dv.data();
  }
  Compute(call);
  const auto round = [&problem](void* target, const std::vector<float>& values) {
    Compute(ConvertCall{problem.dtype, target, values.data(), static_cast<int64_t>(values.size())});
  };
  for (size_t i = 0; i < sums.size(); ++i) {
    round(call.blocks[i].dk_out, sums[i].dk);
    round(call.blocks[i].dv_out, sums[i].dv);
  }
}

// A call, and the bias gradient that its kernel also computes.
struct FakeWork {
  KernelCall call;
  std::optional<BiasGradientCall> gradient;
};

class FakeKernel : public PreparedKernel {
 public:
  FakeKernel(KernelCall call, int64_t scratch_bytes,
             std::optional<BiasGradientCall> gradient = std::nullopt)
      : PreparedKernel(NameOf(call), ClassOf(call)),
        number_(NextNumber()),
        // A kernel that also stores the gradient of a bias does not store them.
        stores_key_gradients_(!gradient.has_value() && StoresKeyGradients(call)),
        work_(std::make_shared<const FakeWork>(FakeWork{std::move(call), std::move(gradient)})) {
    table_bytes_ = kTableBytes;
    scratch_bytes_ = scratch_bytes;
  }

  bool stores_key_gradients() const override { return stores_key_gradients_; }
  std::optional<int64_t> keys_word_offset() const override {
    const auto* const forward = std::get_if<ForwardCall>(&work_->call);
    if (forward == nullptr || !forward->has_late_keys()) return std::nullopt;
    return kKeysWordOffset;
  }
  void WriteTables(void* target) const override {
    std::memset(target, 0, kTableBytes);
    std::memcpy(target, &number_, sizeof(number_));
  }
  void DropTables() override {}

  absl::Status Launch(const TableLaunch& launch) const override {
    FakeCudaEnqueue(launch.stream,
                    [number = number_, stores = stores_key_gradients_, work = work_, launch] {
                      int64_t table = 0;
                      std::memcpy(&table, launch.tables, sizeof(table));
                      if (table != number) std::abort();
                      const volatile uint32_t* stop_word = launch.stop_word;
                      if (stop_word != nullptr && *stop_word != 0) return;
                      if (launch.awaits_keys) {
                        AwaitKeys(launch, std::get<ForwardCall>(work->call).blocks.back().late);
                      }
                      if (stores) return ComputeAndStore(std::get<BackwardCall>(work->call));
                      Compute(work->call);
                      if (work->gradient.has_value()) Compute(*work->gradient);
                    });
    return absl::OkStatus();
  }

 private:
  static void AwaitKeys(const TableLaunch& launch, int32_t last) {
    auto* const word = reinterpret_cast<volatile uint32_t*>(
        const_cast<char*>(static_cast<const char*>(launch.tables)) + kKeysWordOffset);
    const volatile uint32_t* stop_word = launch.stop_word;
    while (*word < static_cast<uint32_t>(last)) {
      if (stop_word != nullptr && *stop_word != 0) return;
      std::this_thread::yield();
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    *word = 0;
  }
  static std::string_view NameOf(const KernelCall& call) {
    return ProductProblem(call) == nullptr ? std::string_view() : kName;
  }
  static std::string_view ClassOf(const KernelCall& call) {
    const AttentionProblem* problem = ProductProblem(call);
    if (problem == nullptr) return kPlainKernelClass;
    if (problem->terms.any()) return kTermKernelClass;
    return problem->compute == ComputeDType::kFloat8E4M3 ? kFloat8KernelClass : kPlainKernelClass;
  }

  const int64_t number_;
  const bool stores_key_gradients_;
  const std::shared_ptr<const FakeWork> work_;
};

// Zeroes the required elements, and fills those that later calls store with NaN. A test that reads
// them without these calls then fails.
class FakeZero : public PreparedKernel {
 public:
  FakeZero(const ZeroCall& call, PartlyStored partly)
      : PreparedKernel(std::string_view()), call_(call), partly_(std::move(partly)) {}
  void WriteTables(void*) const override {}
  void DropTables() override {}
  absl::Status Launch(const TableLaunch& launch) const override {
    FakeCudaEnqueue(launch.stream, [call = call_, partly = partly_] { Fill(call, partly); });
    return absl::OkStatus();
  }

 private:
  static void Fill(const ZeroCall& call, const PartlyStored& partly) {
    std::memset(call.target, 0, call.bytes);
    for (int64_t plane = 0; plane < partly.planes; ++plane) {
      for (const StoredRows& stored : partly.stored) {
        for (int64_t r = 0; r < stored.count; ++r) {
          const int64_t begin = std::clamp(stored.first + r, stored.low, stored.high);
          const int64_t end = std::clamp(stored.end + r, begin, stored.high);
          const int64_t at = (plane * partly.rows + stored.begin + r) * partly.columns + begin;
          std::memset(static_cast<char*>(call.target) + at * partly.element_bytes, 0xff,
                      (end - begin) * partly.element_bytes);
        }
      }
    }
  }

  const ZeroCall call_;
  const PartlyStored partly_;
};

bool Serves(const AttentionProblem&, const DeviceInfo&) { return true; }

bool TakesLateKeysOf(const ForwardCall& call) { return !call.problem->terms.any(); }

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareFakeForward(const ForwardCall& call,
                                                                   const DeviceInfo&,
                                                                   const KernelTuning&) {
  return std::make_unique<FakeKernel>(call, call.q_rows < 16 ? int64_t{1} << 20 : 0);
}

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareFakeBackward(const BackwardCall& call,
                                                                    const DeviceInfo&,
                                                                    const KernelTuning&) {
  return std::make_unique<FakeKernel>(call, 0);
}

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareFakeBiasGradient(
    const BiasGradientCall& call, const DeviceInfo&) {
  return std::make_unique<FakeKernel>(call, 0);
}

// Computes both gradients if each head has a separate plane of the bias, as a GPU's families may.
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareFakeBothGradients(
    const BackwardCall& call, const BiasGradientCall& gradient, const DeviceInfo&) {
  if (!call.problem->terms.bias->per_head) return nullptr;
  return std::make_unique<FakeKernel>(call, 0, gradient);
}

std::vector<KernelEntry> NoEntries(const DeviceInfo&) { return {}; }

}  // namespace

const std::vector<KernelFamily>& Families() {
  static const auto* const families = [] {
    KernelFamily family{kName, Serves, Serves, PrepareFakeForward, PrepareFakeBackward, NoEntries};
    family.takes_late_keys = TakesLateKeysOf;
    family.repeats = true;
    family.float8 = true;
    family.terms = true;
    family.prepare_bias_gradient = PrepareFakeBiasGradient;
    family.prepare_both_gradients = PrepareFakeBothGradients;
    return new std::vector<KernelFamily>{family};
  }();
  return *families;
}

absl::StatusOr<DeviceInfo> QueryDevice(int) { return DeviceInfo{132, 9, 227 << 10}; }

absl::Status LoadKernels(const DeviceInfo&) { return absl::OkStatus(); }

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareGather(const GatherCall& call) {
  return std::make_unique<FakeKernel>(call, 0);
}
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareScatter(const ScatterCall& call) {
  return std::make_unique<FakeKernel>(call, 0);
}

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareProbabilities(const ProbabilitiesCall& call,
                                                                     const DeviceInfo&) {
  return std::make_unique<FakeKernel>(call, 0);
}

std::unique_ptr<PreparedKernel> PrepareZero(const ZeroCall& call,
                                            const std::vector<const BiasGradientCall*>& behind) {
  std::optional<PartlyStored> partly = PartlyStoredOf(call, behind);
  return partly.has_value() ? std::make_unique<FakeZero>(call, *std::move(partly)) : nullptr;
}

absl::Status StartDelta(const DeltaCall& call, cudaStream_t stream) {
  return Enqueue(call, stream);
}
absl::Status StartSinkGradient(const SinkGradientCall& call, cudaStream_t stream) {
  return Enqueue(call, stream);
}
absl::Status StartZero(const ZeroCall& call, cudaStream_t stream) { return Enqueue(call, stream); }
absl::Status StartAdd(const AddCall& call, cudaStream_t stream) { return Enqueue(call, stream); }
absl::Status StartConvert(const ConvertCall& call, cudaStream_t stream) {
  return Enqueue(call, stream);
}
absl::Status StartMerge(const MergeCall& call, cudaStream_t stream) {
  return Enqueue(call, stream);
}
absl::Status StartCopy(const CopyCall& call, cudaStream_t stream) { return Enqueue(call, stream); }

}  // namespace ringattn::worker::cuda
