#include "worker/testing/scalar_device.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/time/clock.h"
#include "common/attention/merge.h"
#include "worker/device/host_call.h"
#include "worker/testing/staged_copies.h"

namespace ringattn::worker {
namespace {

class VectorBuffer : public DeviceBuffer {
 public:
  explicit VectorBuffer(int64_t bytes) : memory_((bytes + 63) / 64 + 1), bytes_(bytes) {}
  void* data() override { return bytes_ == 0 ? nullptr : memory_.data(); }
  int64_t bytes() const override { return bytes_; }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> memory_;
  int64_t bytes_;
};

// One query row of one head: online softmax over every key that it sees.
class Row {
 public:
  Row(const ForwardCall& call, int64_t batch, int64_t row, int64_t head)
      : call_(call), p_(*call.problem), batch_(batch), head_(head) {
    const int64_t at = (batch * call.q_rows + row) * p_.num_heads + head;
    q_ = static_cast<const float*>(call.q) + at * p_.head_dim;
    out_ = (call.final ? static_cast<float*>(call.out) : call.out_acc) + at * p_.head_dim_v;
    acc_ = call.out_acc == nullptr ? nullptr : call.out_acc + at * p_.head_dim_v;
    lse_ = call.lse + (batch * p_.num_heads + head) * call.q_rows + row;
    for (const Piece& piece : call.q_pieces) {
      if (row < piece.local_begin || row >= piece.local_begin + piece.length) continue;
      piece_ = piece;
      row_ = row - piece.local_begin;
    }
  }

  void Compute() {
    std::vector<float> out(p_.head_dim_v, 0.0f);
    float lse = -std::numeric_limits<float>::infinity();
    if (!call_.initial) {
      lse = *lse_;
      std::memcpy(out.data(), acc_, out.size() * 4);
    }
    for (const KvBlock& block : call_.blocks) {
      for (const Piece& piece : block.pieces) {
        const RowRange keys = KeysOfRow(piece_, row_, piece, p_.bands[piece_.document]);
        for (int64_t key = keys.begin; key < keys.end; ++key) {
          Add(block, piece.local_begin + key, &out, &lse);
        }
      }
    }
    std::memcpy(out_, out.data(), out.size() * 4);
    *lse_ = lse;
  }

 private:
  void Add(const KvBlock& block, int64_t key, std::vector<float>* out, float* lse) {
    const int64_t kv_head = head_ / (p_.num_heads / p_.num_kv_heads);
    const int64_t at = (batch_ * block.rows + key) * p_.num_kv_heads + kv_head;
    const float* k = static_cast<const float*>(block.k) + at * p_.head_dim;
    const float* v = static_cast<const float*>(block.v) + at * p_.head_dim_v;
    float score = 0;
    for (int64_t d = 0; d < p_.head_dim; ++d) score += q_[d] * k[d];
    score *= p_.softmax_scale;
    if (p_.softcap > 0) score = p_.softcap * std::tanh(score / p_.softcap);
    const MergeWeights weights = MergeLse(*lse, score);
    for (int64_t d = 0; d < p_.head_dim_v; ++d) {
      (*out)[d] = weights.first * (*out)[d] + weights.second * v[d];
    }
    *lse = weights.lse;
  }

  const ForwardCall& call_;
  const AttentionProblem& p_;
  int64_t batch_, head_, row_ = 0;
  Piece piece_;
  const float* q_;
  const float* acc_;
  float* out_;
  float* lse_;
};

absl::Status Forward(const ForwardCall& call, RunControl* control) {
  if (call.problem->dtype != DType::kFloat32) return absl::UnimplementedError("fp32 only");
  for (int64_t batch = 0; batch < call.problem->batch; ++batch) {
    for (int64_t row = 0; row < call.q_rows; ++row) {
      for (int64_t head = 0; head < call.problem->num_heads; ++head) {
        Row(call, batch, row, head).Compute();
      }
      control->progress.fetch_add(1);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceBuffer>> ScalarDevice::Allocate(int64_t bytes) {
  return std::make_unique<VectorBuffer>(bytes);
}

absl::StatusOr<PreparedCalls> ScalarDevice::Prepare(std::vector<KernelCall> calls) {
  return PrepareHostCalls(
      std::move(calls), [](DType) { return KernelName{.family = "scalar"}; },
      [this](const KernelCall& call, std::vector<EventRef> after, RunControl* control) {
        return queue_.Start([this, &call, control] { return Run(call, control); }, std::move(after),
                            HostQueue::OnFailure::kSkip);
      });
}

absl::Status ScalarDevice::Run(const KernelCall& call, RunControl* control) {
  const absl::Time end = absl::Now() + absl::Nanoseconds(delay_ns_.load());
  while (stuck_ || (absl::Now() < end && !control->stop)) {
    hangs_ = stuck_.load();
    absl::SleepFor(absl::Milliseconds(1));
  }
  hangs_ = false;
  if (control->stop) return absl::OkStatus();
  if (const auto* forward = std::get_if<ForwardCall>(&call)) return Forward(*forward, control);
  if (const auto* zero = std::get_if<ZeroCall>(&call)) {
    std::memset(zero->target, 0, zero->bytes);
    return absl::OkStatus();
  }
  return absl::UnimplementedError("forward only");
}

void ScalarDevice::SetStaged(absl::Duration per_copy, int64_t workspace_bytes) {
  staged_ = true;
  per_copy_ = per_copy;
  workspace_bytes_ = workspace_bytes;
}

absl::StatusOr<std::unique_ptr<HostPin>> ScalarDevice::PinHost(void* data, int64_t bytes) {
  if (!on_pin_) return Device::PinHost(data, bytes);
  on_pin_();
  return std::make_unique<HostPin>();
}

absl::StatusOr<std::unique_ptr<Upload>> ScalarDevice::BeginUpload(
    std::vector<UploadTarget> targets) {
  if (!staged_) return Device::BeginUpload(std::move(targets));
  return MakeStagedUpload(&uploads_, per_copy_, std::move(targets));
}

std::unique_ptr<Download> ScalarDevice::BeginDownload(std::vector<DeviceRange> ranges,
                                                      std::function<void()> on_ready) {
  if (!staged_) return Device::BeginDownload(std::move(ranges), std::move(on_ready));
  return MakeStagedDownload(&downloads_, per_copy_, std::move(ranges), std::move(on_ready));
}

absl::Status ScalarDevice::CopyFromHost(void* device, const void* host, int64_t bytes) {
  if (bytes > 0) std::memcpy(device, host, bytes);
  return absl::OkStatus();
}

absl::Status ScalarDevice::CopyToHost(void* host, const void* device, int64_t bytes) {
  if (bytes > 0) std::memcpy(host, device, bytes);
  return absl::OkStatus();
}

}  // namespace ringattn::worker
