#include "worker/measurement/device_measurement.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "common/attention/dtype.h"
#include "common/base/monotonic_time.h"

namespace ringattn::worker {
namespace {

constexpr int kCallsInARow = 32;
constexpr int64_t kDrawnValues = (1 << 18) - 5;  // odd, so that a tensor's rows differ

// The kind of a measured call.
struct CallKind {
  MeasuredCall size;
  DType dtype = DType::kBFloat16;
  bool backward = false;
  bool score_terms = false;
  bool deterministic = false;
  bool softcap = false;
  int64_t head_dim = ServedCalls().head_dim;

  double flops() const {
    const double products = backward ? 5 : 2;
    return products * 2.0 * size.rows * size.rows * head_dim * size.heads;
  }
};

// A prepared call and its operands.
class CallOnDevice {
 public:
  static absl::StatusOr<std::unique_ptr<CallOnDevice>> Make(Device& device, const CallKind& kind) {
    std::unique_ptr<CallOnDevice> made(new CallOnDevice(device, kind));
    if (absl::Status status = made->Init(); !status.ok()) return status;
    return made;
  }

  EventRef Start() { return device_.Start(*prepared_.front(), {}, &control_); }

 private:
  CallOnDevice(Device& device, const CallKind& kind) : device_(device), kind_(kind) {}

  absl::Status Init() {
    problem_.dtype = kind_.dtype;
    problem_.num_heads = problem_.num_kv_heads = kind_.size.heads;
    problem_.head_dim = problem_.head_dim_v = kind_.head_dim;
    problem_.softmax_scale = 0.1f;
    problem_.softcap = kind_.softcap ? 30.0f : 0.0f;
    problem_.deterministic = kind_.deterministic;
    problem_.bands = {Band{}};
    if (kind_.score_terms) AddTerms();
    absl::StatusOr<KernelCall> call = kind_.backward ? Backward() : Forward();
    if (!call.ok()) return call.status();
    absl::StatusOr<PreparedCalls> prepared = device_.Prepare({*std::move(call)});
    if (!prepared.ok()) return prepared.status();
    prepared_ = *std::move(prepared);
    return absl::OkStatus();
  }

  absl::StatusOr<KernelCall> Forward() {
    ForwardCall call;
    call.problem = &problem_;
    call.q_rows = kind_.size.rows;
    call.q_pieces = {WholePiece()};
    call.q = Tensor(kind_.dtype);
    call.blocks = {{kind_.size.rows, {WholePiece()}, Tensor(kind_.dtype), Tensor(kind_.dtype)}};
    call.out = Tensor(kind_.dtype);
    call.lse = Statistic(0.0f);
    call.initial = call.final = true;
    call.terms = terms_;
    SetIds(call.blocks.front());
    if (!failure_.ok()) return failure_;
    return KernelCall(std::move(call));
  }

  absl::StatusOr<KernelCall> Backward() {
    BackwardCall call;
    call.problem = &problem_;
    call.q_rows = kind_.size.rows;
    call.q_pieces = {WholePiece()};
    call.q = Tensor(kind_.dtype);
    call.dout = Tensor(kind_.dtype);
    call.lse = Statistic(std::log(static_cast<float>(kind_.size.rows)));
    call.delta = Statistic(0.0f);
    call.dq_acc = static_cast<float*>(Tensor(DType::kFloat32));
    KvBlock block{kind_.size.rows, {WholePiece()}, Tensor(kind_.dtype), Tensor(kind_.dtype)};
    block.dk = static_cast<float*>(Tensor(DType::kFloat32));
    block.dv = static_cast<float*>(Tensor(DType::kFloat32));
    SetIds(block);
    call.terms = terms_;
    call.blocks = {std::move(block)};
    if (!failure_.ok()) return failure_;
    return KernelCall(std::move(call));
  }

  // All terms together: plans do not distinguish which terms a request uses.
  void AddTerms() {
    const int64_t rows = kind_.size.rows, heads = kind_.size.heads;
    ScoreTerms& terms = problem_.terms;
    terms.shifts = {0};
    terms.columns = rows;
    terms.alibi_slopes.assign(heads, 0.01f);
    const bool per_head = kind_.size.pairs_per_head;
    const int64_t pairs = rows * rows * (per_head ? heads : 1);
    terms.bias = BiasForm{.per_head = per_head};
    terms.mask = MaskForm{.per_head = per_head};
    terms.segment_ids = true;
    terms.dropout = {.threshold = 6554, .seed = 1};
    terms_.bias = Upload(kind_.dtype, std::vector<float>(pairs, 0.25f));
    terms_.mask = static_cast<const uint8_t*>(UploadBytes(std::vector<char>(pairs, 1)));
    ids_ = static_cast<const int32_t*>(UploadBytes(std::vector<char>(rows * sizeof(int32_t), 0)));
    terms_.q_segment_ids = ids_;
  }

  void SetIds(KvBlock& block) const { block.segment_ids = ids_; }

  Piece WholePiece() const { return Piece{.length = kind_.size.rows}; }

  // Values around ±1: with zeros, a GPU draws less power and runs faster. A few values are
  // repeated, because a GPU's tensors have tens of millions of elements.
  void* Tensor(DType dtype) {
    const int64_t count = kind_.size.rows * kind_.size.heads * kind_.head_dim;
    std::vector<float> values(std::min(count, kDrawnValues));
    uint32_t state = 1;
    for (float& value : values) {
      state = state * 1664525u + 1013904223u;
      value = (0.5f + static_cast<float>(state >> 24) / 256.0f) * (state >> 8 & 1 ? -1.0f : 1.0f);
    }
    return Upload(dtype, values, count);
  }

  float* Statistic(float value) {
    return static_cast<float*>(
        Upload(DType::kFloat32, std::vector<float>(kind_.size.rows * kind_.size.heads, value)));
  }

  void* Upload(DType dtype, const std::vector<float>& values) {
    return Upload(dtype, values, static_cast<int64_t>(values.size()));
  }

  // Uploads `count` elements by repeating `values`. Returns null after an error.
  void* Upload(DType dtype, const std::vector<float>& values, int64_t count) {
    if (!failure_.ok()) return nullptr;
    const int64_t period = static_cast<int64_t>(values.size()) * ElementBytes(dtype);
    std::vector<char> converted(count * ElementBytes(dtype));
    ConvertFromFloat(dtype, values.data(), converted.data(), static_cast<int64_t>(values.size()));
    const int64_t bytes = static_cast<int64_t>(converted.size());
    for (int64_t filled = period; filled < bytes; filled += period) {
      std::memcpy(converted.data() + filled, converted.data(), std::min(period, bytes - filled));
    }
    return UploadBytes(converted);
  }

  void* UploadBytes(const std::vector<char>& bytes) {
    if (!failure_.ok()) return nullptr;
    absl::StatusOr<std::unique_ptr<DeviceBuffer>> buffer =
        device_.Allocate(static_cast<int64_t>(bytes.size()));
    failure_ = buffer.status();
    if (!failure_.ok()) return nullptr;
    failure_ =
        device_.CopyFromHost((*buffer)->data(), bytes.data(), static_cast<int64_t>(bytes.size()));
    buffers_.push_back(*std::move(buffer));
    return buffers_.back()->data();
  }

  Device& device_;
  const CallKind kind_;
  absl::Status failure_;
  AttentionProblem problem_;
  TermOperands terms_;
  const int32_t* ids_ = nullptr;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  PreparedCalls prepared_;
  RunControl control_;
};

absl::Time Patience() { return MonotonicNow() + absl::Minutes(1); }

absl::StatusOr<double> MeasureFlopsPerSecond(Device& device, const CallKind& kind,
                                             absl::Duration budget) {
  absl::StatusOr<std::unique_ptr<CallOnDevice>> call = CallOnDevice::Make(device, kind);
  if (!call.ok()) return call.status();
  // Takes the fastest call, which was disturbed least: the first calls warm up threads, caches and
  // clocks, and other processes start at the same time.
  absl::Duration best = absl::InfiniteDuration();
  const absl::Time end = MonotonicNow() + budget;
  do {
    EventRef done = (*call)->Start();
    absl::Status status = done->Wait(Patience());
    if (!status.ok()) return status;
    best = std::min(best, done->end_time() - done->begin_time());
  } while (MonotonicNow() < end);
  return kind.flops() / absl::ToDoubleSeconds(std::max(best, absl::Nanoseconds(1)));
}

}  // namespace

absl::StatusOr<std::vector<KernelRate>> MeasureKernelRates(Device& device, const MeasuredCall& size,
                                                           absl::Duration budget,
                                                           const MeasuredCall* with_terms) {
  std::vector<KernelRate> rates;
  for (const ServedCalls& served : device.served_calls()) {
    const RequestKind& kind = served.kind;
    const bool slow = kind.score_terms || kind.deterministic.value_or(false);
    const MeasuredCall& own = slow && with_terms != nullptr ? *with_terms : size;
    absl::StatusOr<double> flops = MeasureFlopsPerSecond(
        device,
        {own, served.dtypes.front(), served.backward, kind.score_terms,
         kind.deterministic.value_or(false), kind.softcap.value_or(false), served.head_dim},
        budget);
    if (!flops.ok()) return flops.status();
    rates.push_back({served.family, served.dtypes,
                     served.backward ? Direction::kBackward : Direction::kForward, *flops, kind});
  }
  return rates;
}

absl::StatusOr<double> MeasureCallSeconds(Device& device, absl::Duration budget) {
  const std::vector<ServedCalls> served = device.served_calls();
  if (served.empty()) return absl::UnimplementedError("the device has no attention kernels");
  absl::StatusOr<std::unique_ptr<CallOnDevice>> call = CallOnDevice::Make(
      device, {{.rows = 1, .heads = 1}, served.front().dtypes.front(), served.front().backward});
  if (!call.ok()) return call.status();
  absl::Duration best = absl::InfiniteDuration();
  const absl::Time end = MonotonicNow() + budget;
  do {
    std::vector<EventRef> calls;
    for (int i = 0; i <= kCallsInARow; ++i) calls.push_back((*call)->Start());
    // Waits for every call, because an event may use its RunControl until its end has been
    // observed. Waits for the last one first, as waking up between calls would disturb the
    // measurement.
    absl::Status failure;
    for (size_t i = calls.size(); i-- > 0;) failure.Update(calls[i]->Wait(Patience()));
    if (!failure.ok()) return failure;
    best = std::min(best, (calls.back()->end_time() - calls.front()->end_time()) / kCallsInARow);
  } while (MonotonicNow() < end);
  return absl::ToDoubleSeconds(std::max(best, absl::Nanoseconds(1)));
}

}  // namespace ringattn::worker
