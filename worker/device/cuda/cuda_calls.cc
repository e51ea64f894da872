#include "worker/device/cuda/cuda_calls.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "common/base/monotonic_time.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {
namespace {

using cuda::PreparedKernel;
using cuda::TableLaunch;
using Attention = std::unique_ptr<PreparedKernel>;
using Kernel = PreparedCudaCall::Kernel;

constexpr int64_t kStopWordBytes = 256;  // keeps the following tables aligned

struct Planned {
  std::vector<Kernel> kernels;
  std::vector<int64_t> tables_offsets;
  int64_t tables_end = kStopWordBytes;  // end of stop word and tables
  int64_t scratch_bytes = 0;

  int64_t bytes() const { return tables_end + scratch_bytes; }
};

absl::StatusOr<Kernel> KernelOf(absl::StatusOr<Attention> prepared) {
  if (!prepared.ok()) return prepared.status();
  return Kernel(*std::move(prepared));
}

absl::StatusOr<Kernel> Choose(const KernelCall& call, const KernelChoice& choice) {
  if (const auto* forward = std::get_if<ForwardCall>(&call)) {
    cuda::KernelTuning tuning = choice.tuning;
    if (forward->problem->tuning.key_splits == 1) tuning.max_key_splits = 1;
    return KernelOf(cuda::PrepareForward(*forward, choice.device, tuning));
  }
  if (const auto* backward = std::get_if<BackwardCall>(&call)) {
    return KernelOf(cuda::PrepareBackward(*backward, choice.device, choice.tuning));
  }
  if (const auto* gradient = std::get_if<BiasGradientCall>(&call)) {
    return KernelOf(cuda::PrepareBiasGradient(*gradient, choice.device, choice.tuning));
  }
  if (const auto* probabilities = std::get_if<ProbabilitiesCall>(&call)) {
    return KernelOf(cuda::PrepareProbabilities(*probabilities, choice.device));
  }
  if (const auto* delta = std::get_if<DeltaCall>(&call)) return Kernel(*delta);
  if (const auto* sinks = std::get_if<SinkGradientCall>(&call)) return Kernel(*sinks);
  if (const auto* zero = std::get_if<ZeroCall>(&call)) return Kernel(*zero);
  if (const auto* add = std::get_if<AddCall>(&call)) return Kernel(*add);
  if (const auto* merge = std::get_if<MergeCall>(&call)) return Kernel(*merge);
  if (const auto* copy = std::get_if<CopyCall>(&call)) return Kernel(*copy);
  if (const auto* gather = std::get_if<GatherCall>(&call)) {
    return KernelOf(cuda::PrepareGather(*gather));
  }
  if (const auto* scatter = std::get_if<ScatterCall>(&call)) {
    return KernelOf(cuda::PrepareScatter(*scatter));
  }
  return Kernel(std::get<ConvertCall>(call));
}

void Add(Kernel kernel, Planned& planned) {
  planned.tables_offsets.push_back(planned.tables_end);
  if (const auto* attention = std::get_if<Attention>(&kernel)) {
    planned.tables_end += (*attention)->table_bytes();
    planned.scratch_bytes = std::max(planned.scratch_bytes, (*attention)->scratch_bytes());
  }
  planned.kernels.push_back(std::move(kernel));
}

// Returns the kernels that compute a backward call together with the bias-gradient call after it;
// empty if no kernel computes both.
absl::StatusOr<cuda::PreparedGradients> ChooseBoth(const KernelCall& call, const KernelCall& next,
                                                   const KernelChoice& choice) {
  const auto* const backward = std::get_if<BackwardCall>(&call);
  const auto* const gradient = std::get_if<BiasGradientCall>(&next);
  if (backward == nullptr || gradient == nullptr) return cuda::PreparedGradients();
  return cuda::PrepareGradients(*backward, *gradient, choice.device, choice.tuning);
}

bool Overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto* const x = static_cast<const char*>(a);
  const auto* const y = static_cast<const char*>(b);
  return x < y + b_bytes && y < x + a_bytes;
}

// Returns whether a call other than an attention call may access memory that `zero` writes.
bool Touches(const KernelCall& call, const ZeroCall& zero) {
  const auto touches = [&zero](const void* address, int64_t bytes) {
    return Overlap(zero.target, zero.bytes, address, bytes);
  };
  if (const auto* other = std::get_if<ZeroCall>(&call)) return touches(other->target, other->bytes);
  if (const auto* copy = std::get_if<CopyCall>(&call)) {
    const auto bytes = [copy](int64_t pitch) { return copy->runs * pitch + copy->run_bytes; };
    return touches(copy->source, bytes(copy->source_pitch)) ||
           touches(copy->target, bytes(copy->target_pitch));
  }
  if (const auto* add = std::get_if<AddCall>(&call)) {
    return touches(add->source, 4 * add->count) || touches(add->target, 4 * add->count);
  }
  if (const auto* convert = std::get_if<ConvertCall>(&call)) {
    return touches(convert->source, 4 * convert->count) ||
           touches(convert->target, 4 * convert->count);
  }
  return std::holds_alternative<GatherCall>(call) || std::holds_alternative<ScatterCall>(call);
}

// Returns the bias-gradient calls whose results go to the memory that the zero call at `index`
// clears, up to the first other call that accesses it.
std::vector<const BiasGradientCall*> StoredBehind(const std::vector<KernelCall>& calls,
                                                  size_t index) {
  const auto& zero = std::get<ZeroCall>(calls[index]);
  std::vector<const BiasGradientCall*> stored;
  for (size_t i = index + 1; i < calls.size() && !Touches(calls[i], zero); ++i) {
    const auto* const gradient = std::get_if<BiasGradientCall>(&calls[i]);
    if (gradient != nullptr && gradient->dbias == zero.target) stored.push_back(gradient);
  }
  return stored;
}

// Returns the addresses of all bias gradients. Operations may have very many zero calls; only those
// that clear one of these addresses need a search of the calls after them.
std::set<const void*> BiasGradientsOf(const std::vector<KernelCall>& calls) {
  std::set<const void*> gradients;
  for (const KernelCall& call : calls) {
    const auto* const gradient = std::get_if<BiasGradientCall>(&call);
    if (gradient != nullptr && gradient->dbias != nullptr) gradients.insert(gradient->dbias);
  }
  return gradients;
}

// If a kernel stores its gradients directly, replaces the calls that zero and convert their sums by
// nothing.
void TakeStoreHints(const std::vector<KernelCall>& calls, Planned& planned) {
  std::set<int> taken;
  for (size_t i = 0; i < calls.size(); ++i) {
    const auto* const backward = std::get_if<BackwardCall>(&calls[i]);
    if (backward == nullptr || backward->store_hint == kNoStoreHint) continue;
    if (std::get<Attention>(planned.kernels[i])->stores_key_gradients()) {
      taken.insert(backward->store_hint);
    }
  }
  if (taken.empty()) return;
  for (Kernel& kernel : planned.kernels) {
    const auto* const zero = std::get_if<ZeroCall>(&kernel);
    const auto* const convert = std::get_if<ConvertCall>(&kernel);
    const int store_hint = zero != nullptr      ? zero->store_hint
                           : convert != nullptr ? convert->store_hint
                                                : kNoStoreHint;
    if (taken.count(store_hint) > 0) kernel = std::monostate();
  }
}

absl::StatusOr<Planned> Plan(const std::vector<KernelCall>& calls, const KernelChoice& choice) {
  const std::set<const void*> bias_gradients = BiasGradientsOf(calls);
  Planned planned;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (i + 1 < calls.size()) {
      absl::StatusOr<cuda::PreparedGradients> both = ChooseBoth(calls[i], calls[i + 1], choice);
      if (!both.ok()) return both.status();
      if (both->backward != nullptr) {
        Add(std::move(both->backward), planned);
        Add(std::move(both->bias_gradient), planned);
        ++i;
        continue;
      }
    }
    const auto* const zero = std::get_if<ZeroCall>(&calls[i]);
    if (zero != nullptr && bias_gradients.count(zero->target) > 0) {
      Attention kernel = cuda::PrepareZero(*zero, StoredBehind(calls, i));
      if (kernel != nullptr) {
        Add(std::move(kernel), planned);
        continue;
      }
    }
    absl::StatusOr<Kernel> kernel = Choose(calls[i], choice);
    if (!kernel.ok()) return kernel.status();
    Add(*std::move(kernel), planned);
  }
  TakeStoreHints(calls, planned);
  return planned;
}

absl::StatusOr<const cuda::KernelFamily*> FamilyOf(const ChosenBy& by, const KernelChoice& choice,
                                                   ComputeDType compute = ComputeDType::kAsInputs) {
  AttentionProblem problem;
  problem.dtype = by.dtype;
  problem.head_dim = problem.head_dim_v = by.head_dim;
  problem.softcap = by.softcap ? 30.0f : 0.0f;
  problem.terms.segment_ids = by.score_terms;  // families compute all terms or none
  problem.deterministic = by.deterministic;
  problem.compute = compute;
  return by.backward ? cuda::ChooseBackward(problem, choice.device, choice.tuning)
                     : cuda::ChooseForward(problem, choice.device, choice.tuning);
}

}  // namespace

CallWorkspace::CallWorkspace(CudaEventPool* events, std::unique_ptr<DeviceBuffer> memory)
    : events_(events), memory_(std::move(memory)) {}

CallWorkspace::~CallWorkspace() {
  absl::MutexLock lock(&mutex_);
  if (stopped_ != nullptr) (void)stopped_->Wait(MonotonicNow() + absl::Seconds(10));
}

absl::Status CallWorkspace::Stop(cudaStream_t stream, const uint32_t* one) {
  absl::MutexLock lock(&mutex_);
  if (stopped_ != nullptr) return absl::OkStatus();
  stopped_ = std::make_shared<CudaEvent>(events_, nullptr, 0);
  absl::Status status =
      CudaStatus(cudaMemcpyAsync(data(), one, sizeof(*one), cudaMemcpyHostToDevice, stream),
                 "cudaMemcpyAsync of the stop word");
  if (status.ok()) status = stopped_->RecordEnd(stream);
  if (!status.ok()) stopped_->Fail(status);
  return status;
}

PreparedCudaCall::PreparedCudaCall(CudaCallQueue* queue, Kernel kernel,
                                   std::shared_ptr<CallWorkspace> workspace, int64_t tables_offset,
                                   int64_t scratch_offset)
    : queue_(queue),
      kernel_(std::move(kernel)),
      workspace_(std::move(workspace)),
      tables_offset_(tables_offset),
      scratch_offset_(scratch_offset) {}

KernelName PreparedCudaCall::kernel() const {
  const auto* attention = std::get_if<Attention>(&kernel_);
  return attention == nullptr ? KernelName() : (*attention)->name();
}

bool PreparedCudaCall::adds_atomically() const {
  const auto* attention = std::get_if<Attention>(&kernel_);
  return attention != nullptr && (*attention)->adds_atomically();
}

uint32_t* PreparedCudaCall::keys_word() const {
  const auto* attention = std::get_if<Attention>(&kernel_);
  if (attention == nullptr) return nullptr;
  const std::optional<int64_t> offset = (*attention)->keys_word_offset();
  if (!offset.has_value()) return nullptr;
  return reinterpret_cast<uint32_t*>(workspace_->data() + tables_offset_ + *offset);
}

absl::Status PreparedCudaCall::Launch(cudaStream_t stream, bool awaits_keys) const {
  const TableLaunch launch{stream, workspace_->data() + tables_offset_,
                           workspace_->data() + scratch_offset_, workspace_->stop_word(),
                           awaits_keys};
  struct Visitor {
    const TableLaunch& launch;
    absl::Status operator()(const Attention& kernel) const { return kernel->Launch(launch); }
    absl::Status operator()(const DeltaCall& call) const {
      return cuda::StartDelta(call, launch.stream);
    }
    absl::Status operator()(const SinkGradientCall& call) const {
      return cuda::StartSinkGradient(call, launch.stream);
    }
    absl::Status operator()(const ZeroCall& call) const {
      return cuda::StartZero(call, launch.stream);
    }
    absl::Status operator()(const AddCall& call) const {
      return cuda::StartAdd(call, launch.stream);
    }
    absl::Status operator()(const ConvertCall& call) const {
      return cuda::StartConvert(call, launch.stream);
    }
    absl::Status operator()(const MergeCall& call) const {
      return cuda::StartMerge(call, launch.stream);
    }
    absl::Status operator()(const CopyCall& call) const {
      return cuda::StartCopy(call, launch.stream);
    }
    absl::Status operator()(std::monostate) const { return absl::OkStatus(); }
  };
  return std::visit(Visitor{launch}, kernel_);
}

absl::StatusOr<int64_t> CudaWorkspaceBytes(const std::vector<KernelCall>& calls,
                                           const KernelChoice& choice) {
  absl::StatusOr<Planned> planned = Plan(calls, choice);
  if (!planned.ok()) return planned.status();
  return planned->bytes();
}

bool CudaTakesLateKeys(const ForwardCall& call, const KernelChoice& choice) {
  return cuda::TakesLateKeys(call, choice.device, choice.tuning);
}

absl::StatusOr<PreparedCalls> PrepareCudaCalls(const std::vector<KernelCall>& calls,
                                               const KernelChoice& choice, CudaEventPool* events,
                                               CudaMemory* memory, CudaCallQueue* queue) {
  absl::StatusOr<Planned> planned = Plan(calls, choice);
  if (!planned.ok()) return planned.status();
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> buffer = memory->Allocate(planned->bytes());
  if (!buffer.ok()) {
    return absl::Status(buffer.status().code(),
                        absl::StrCat("kernel workspace: ", buffer.status().message()));
  }
  auto workspace = std::make_shared<CallWorkspace>(events, *std::move(buffer));
  std::vector<char> tables(planned->tables_end);  // initializes the stop word to 0
  PreparedCalls prepared;
  for (size_t i = 0; i < planned->kernels.size(); ++i) {
    Kernel& kernel = planned->kernels[i];
    const int64_t offset = planned->tables_offsets[i];
    if (auto* attention = std::get_if<Attention>(&kernel)) {
      absl::Status placed = (*attention)->PlaceScratch(workspace->data() + planned->tables_end);
      if (!placed.ok()) return placed;
      (*attention)->WriteTables(tables.data() + offset);
      (*attention)->DropTables();
    }
    prepared.push_back(std::make_unique<PreparedCudaCall>(queue, std::move(kernel), workspace,
                                                          offset, planned->tables_end));
  }
  absl::Status status = memory->CopyFromHost(workspace->data(), tables.data(), planned->tables_end);
  if (!status.ok()) return status;
  return prepared;
}

std::vector<ServedCalls> CudaServedCalls(const KernelChoice& choice) {
  return ServedCallsBy([&choice](const ChosenBy& by) {
    const auto family = FamilyOf(by, choice);
    return family.ok() ? std::string((*family)->name) : std::string();
  });
}

std::vector<std::string> CudaServedOptions(const KernelChoice& choice) {
  // Every family has bf16. The rates say which other dtypes a forced family has.
  const auto served = [&choice](bool score_terms, bool deterministic) {
    for (const bool backward : {false, true}) {
      const ChosenBy usual{
          .backward = backward, .score_terms = score_terms, .deterministic = deterministic};
      if (!FamilyOf(usual, choice).ok()) return false;
    }
    return true;
  };
  std::vector<std::string> options;
  if (served(true, false)) options = {"dropout", "alibi", "bias", "mask", "segment_ids"};
  options.push_back("dilation_levels");
  options.push_back(
      "reply.probability_rows");  // not a property of families: one kernel serves them all
  if (served(false, true)) options.push_back("deterministic");
  if (FamilyOf({}, choice, ComputeDType::kFloat8E4M3).ok()) options.push_back("compute_dtype");
  return options;
}

}  // namespace ringattn::worker
