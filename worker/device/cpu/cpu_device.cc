#include "worker/device/cpu/cpu_device.h"

#include <cstring>
#include <functional>
#include <string_view>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "worker/device/host_call.h"

namespace ringattn::worker {
namespace {

// How long released memory is kept for the next request: longer than the pause between consecutive
// requests, and too short to matter to other processes.
constexpr absl::Duration kKeepTime = absl::Seconds(1);

// bf16 products use their own instructions; fp16 is widened to fp32.
constexpr std::string_view kBf16Family = "cpu_bf16";
constexpr std::string_view kFp32Family = "cpu_fp32";

KernelName NameOf(DType dtype) {
  return {.family = dtype == DType::kBFloat16 ? kBf16Family : kFp32Family,
          .instructions = CpuKernels::InstructionsFor(dtype)};
}

// Returns the bias-gradient call `next` if the kernels can compute it together with the preceding
// backward `call`; else null.
const BiasGradientCall* BothAtOnce(const KernelCall& call, const KernelCall& next) {
  const auto* const backward = std::get_if<BackwardCall>(&call);
  const auto* const gradient = std::get_if<BiasGradientCall>(&next);
  if (backward == nullptr || gradient == nullptr) return nullptr;
  return CpuKernels::HasBothAtOnce(*backward, *gradient) ? gradient : nullptr;
}

// Untouched pages cost nothing, so the resident size of a worker is what requests really use.
class HostBuffer : public DeviceBuffer {
 public:
  HostBuffer(std::shared_ptr<PagePool> pool, void* data, int64_t bytes)
      : pool_(std::move(pool)), data_(data), bytes_(bytes) {}
  ~HostBuffer() override {
    if (data_ != nullptr) pool_->Give(data_, bytes_);
  }

  void* data() override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  const std::shared_ptr<PagePool> pool_;
  void* const data_;
  const int64_t bytes_;
};

class CpuStepKernels : public StepKernels {
 public:
  explicit CpuStepKernels(int threads) : kernels_(threads) {}

  absl::Status Run(const KernelCall& call, const std::atomic<bool>& stop) override {
    return kernels_.Run(call, stop, nullptr);
  }

 private:
  CpuKernels kernels_;
};

}  // namespace

CpuDevice::CpuDevice(int threads, int64_t memory_limit_bytes)
    : threads_(threads),
      pool_(std::make_shared<PagePool>(memory_limit_bytes, kKeepTime)),
      kernels_(threads, &pause_),
      preempting_kernels_(threads),
      queue_("cpu_device"),
      preempting_queue_("cpu_preempting") {}

absl::StatusOr<std::unique_ptr<DeviceBuffer>> CpuDevice::Allocate(int64_t bytes) {
  if (bytes == 0) return std::make_unique<HostBuffer>(nullptr, nullptr, 0);
  void* const data = pool_->Take(bytes);
  if (data == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot map ", bytes, " bytes of host memory"));
  }
  return std::make_unique<HostBuffer>(pool_, data, bytes);
}

std::vector<ServedCalls> CpuDevice::served_calls() const {
  std::vector<ServedCalls> served;
  for (const bool score_terms : {false, true}) {
    RequestKind kind;  // deterministic order and softcap do not slow CPU kernels down
    kind.score_terms = score_terms;
    for (const bool backward : {false, true}) {
      served.push_back({std::string(kBf16Family), {DType::kBFloat16}, backward, kind});
      served.push_back(
          {std::string(kFp32Family), {DType::kFloat16, DType::kFloat32}, backward, kind});
    }
  }
  return served;
}

std::vector<std::string> CpuDevice::served_options() const {
  return {"dropout",       "alibi",         "bias",
          "mask",          "segment_ids",   "dilation_levels",
          "deterministic", "compute_dtype", "reply.probability_rows"};
}

// Multiples of a row group and of every packed panel. A row's keys are never split.
TuningChoices CpuDevice::tuning_offer() const {
  return {{12, 24, 48, 96, 120, 240, 480}, {192, 384, 576, 768, 960}, {1}};
}

absl::StatusOr<PreparedCalls> CpuDevice::Prepare(std::vector<KernelCall> calls) {
  const StartHostCall start = [this](const KernelCall& call, std::vector<EventRef> after,
                                     RunControl* control) {
    return StartWork([this, &call, control] { return Run(call, control); }, std::move(after),
                     control);
  };
  PreparedCalls prepared;
  for (size_t i = 0; i < calls.size(); ++i) {
    const KernelName kernel = HostKernelName(calls[i], NameOf);
    const auto* const gradient =
        i + 1 < calls.size() ? BothAtOnce(calls[i], calls[i + 1]) : nullptr;
    if (gradient == nullptr) {
      prepared.push_back(std::make_unique<HostCall>(std::move(calls[i]), kernel, start));
      continue;
    }
    prepared.push_back(std::make_unique<HostCall>(
        std::move(calls[i]), kernel,
        [this, gradient = *gradient](const KernelCall& call, std::vector<EventRef> after,
                                     RunControl* control) {
          return StartWork(
              [this, &call, &gradient, control] { return RunBoth(call, gradient, control); },
              std::move(after), control);
        }));
    ++i;
    prepared.push_back(std::make_unique<HostCall>(
        std::move(calls[i]), kernel,
        [this](const KernelCall&, std::vector<EventRef> after, RunControl* control) {
          return StartWork([] { return absl::OkStatus(); }, std::move(after), control);
        }));
  }
  return prepared;
}

absl::StatusOr<std::unique_ptr<StepKernels>> CpuDevice::MakeStepKernels() {
  return std::make_unique<CpuStepKernels>(threads_);
}

absl::Status CpuDevice::Run(const KernelCall& call, RunControl* control) {
  return KernelsOf(*control).Run(call, control->stop, &control->progress, &control->work);
}

absl::Status CpuDevice::RunBoth(const KernelCall& backward, const BiasGradientCall& gradient,
                                RunControl* control) {
  return KernelsOf(*control).RunGradients(std::get<BackwardCall>(backward), gradient, control->stop,
                                          &control->progress, &control->work);
}

EventRef CpuDevice::StartWork(std::function<absl::Status()> work, std::vector<EventRef> after,
                              RunControl* control) {
  HostQueue& queue = control->preempts ? preempting_queue_ : queue_;
  auto run = [work = std::move(work), control]() -> absl::Status {
    if (control->stop.load(std::memory_order_relaxed)) return absl::OkStatus();
    absl::Status status = work();
    // A stopped call counts as done. Later calls are stopped too, and the executor reports the
    // cancellation once.
    if (absl::IsCancelled(status)) return absl::OkStatus();
    return status;
  };
  if (control->runs_on_caller) {
    return queue.RunOrStart(std::move(run), std::move(after), HostQueue::OnFailure::kSkip);
  }
  return queue.Start(std::move(run), std::move(after), HostQueue::OnFailure::kSkip);
}

absl::Status CpuDevice::CopyFromHost(void* device, const void* host, int64_t bytes) {
  if (bytes > 0) std::memcpy(device, host, bytes);
  return absl::OkStatus();
}

absl::Status CpuDevice::CopyToHost(void* host, const void* device, int64_t bytes) {
  if (bytes > 0) std::memcpy(host, device, bytes);
  return absl::OkStatus();
}

std::string CpuDevice::description() const { return absl::StrCat("cpu (", threads_, " threads)"); }

}  // namespace ringattn::worker
