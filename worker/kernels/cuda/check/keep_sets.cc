#include "worker/kernels/cuda/check/keep_sets.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "common/attention/dtype.h"
#include "common/oracle/pair_terms.h"
#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/check/launch_and_wait.h"
#include "worker/kernels/cuda/cuda_kernels.h"
#include "worker/kernels/cuda/launch/family.h"

namespace ringattn::worker::cuda::check {
namespace {

// Number of queries and of keys. Each key has a column of v; the widest kernels with terms have 256
// columns, those on tensor cores 128.
constexpr int64_t kMostRows = 140;
constexpr int64_t kRowsOnTensorCores = 126;
constexpr int64_t kHeads = 3;
constexpr int64_t kBatch = 2;

// One piece of a document, at a position where no tile begins.
struct Placing {
  const char* name;
  int64_t position;
  int64_t stride;
  bool packed;
  bool origins;
};

bool OnTensorCores(const std::string& family) { return family == "sm90"; }

class KeepSets {
 public:
  KeepSets(const DeviceInfo& device, DType dtype, const Placing& placing, const std::string& family)
      : device_(device),
        dtype_(dtype),
        placing_(placing),
        batch_(placing.packed ? 1 : kBatch),
        rows_(!OnTensorCores(family) ? kMostRows : kRowsOnTensorCores),
        dim_(!OnTensorCores(family) ? 256 : 128) {
    tuning_.family = family;
    problem_.dtype = dtype;
    problem_.batch = batch_;
    problem_.num_heads = problem_.num_kv_heads = kHeads;
    problem_.head_dim = problem_.head_dim_v = dim_;
    problem_.bands.assign(2, Band{});
    problem_.terms.packed = placing.packed;
    problem_.terms.shifts.assign(2, 0);
    DropoutForm& dropout = problem_.terms.dropout;
    dropout = {.threshold = 20000, .seed = 0x123456789abcdef0};
    if (!placing.origins) return;
    dropout.first_batch = 5;
    dropout.first_head = 17;
    dropout.first_query = 4'000'000'000u;
    dropout.first_key = 3'999'999'989u;
  }

  // Returns the number of wrong pairs.
  int64_t Run() {
    const int64_t count = batch_ * rows_ * kHeads * dim_;
    const int64_t bytes = count * ElementBytes(dtype_);
    Buffer zeros(bytes), one_hot(bytes), out(bytes), lse(batch_ * kHeads * rows_ * 4);
    Buffer delta(batch_ * kHeads * rows_ * 4), dq(count * 4), dk(count * 4), dv(count * 4);
    Check(StartZero({zeros.get(), bytes}, nullptr));
    Check(StartZero({delta.get(), batch_ * kHeads * rows_ * 4}, nullptr));
    for (Buffer* sum : {&dq, &dk, &dv}) Check(StartZero({sum->get(), count * 4}, nullptr));
    one_hot.Upload(OneHot(count));
    KvBlock block;
    block.rows = rows_;
    block.pieces = Pieces();
    block.k = zeros.get();
    block.v = one_hot.get();
    block.dk = dk.get<float>();
    block.dv = dv.get<float>();
    ForwardCall forward;
    forward.problem = &problem_;
    forward.q_rows = rows_;
    forward.q_pieces = Pieces();
    forward.q = zeros.get();
    forward.blocks = {block};
    forward.lse = lse.get<float>();
    forward.out = out.get();
    forward.initial = forward.final = true;
    LaunchAndWait(PrepareForward(forward, device_, tuning_));
    BackwardCall backward;
    backward.problem = &problem_;
    backward.q_rows = rows_;
    backward.q_pieces = Pieces();
    backward.q = zeros.get();
    backward.dout = one_hot.get();
    backward.lse = lse.get<float>();
    backward.delta = delta.get<float>();
    backward.dq_acc = dq.get<float>();
    backward.blocks = {block};
    LaunchAndWait(PrepareBackward(backward, device_, tuning_));
    return WrongPairs(ToFloats(out.Download<char>()), dv.Download<float>());
  }

 private:
  // Returns two halves; if packed, each is a separate document.
  std::vector<Piece> Pieces() const {
    const Piece whole{0, rows_, 0, placing_.position, placing_.stride};
    if (!placing_.packed) return {whole};
    Piece first = whole, second = whole;
    first.length = second.local_begin = rows_ / 2;
    second.length = rows_ - first.length;
    second.document = 1;
    return {first, second};
  }

  std::vector<char> OneHot(int64_t count) const {
    std::vector<float> values(count, 0.0f);
    for (int64_t row = 0; row < batch_ * rows_; ++row) {
      for (int64_t h = 0; h < kHeads; ++h) values[(row * kHeads + h) * dim_ + row % rows_] = 1.0f;
    }
    std::vector<char> bits(count * ElementBytes(dtype_));
    ConvertFromFloat(dtype_, values.data(), bits.data(), count);
    return bits;
  }

  std::vector<float> ToFloats(const std::vector<char>& bits) const {
    std::vector<float> values(bits.size() / ElementBytes(dtype_));
    ConvertToFloat(dtype_, bits.data(), values.data(), static_cast<int64_t>(values.size()));
    return values;
  }

  int64_t WrongPairs(const std::vector<float>& out, const std::vector<float>& dv) const {
    int64_t wrong = 0;
    const auto at = [this](int64_t b, int64_t row, int64_t h, int64_t column) {
      return ((b * rows_ + row) * kHeads + h) * dim_ + column;
    };
    for (int64_t b = 0; b < batch_; ++b) {
      for (const Piece& piece : Pieces()) {
        const int64_t batch_row = placing_.packed ? piece.document : b;
        for (int64_t h = 0; h < kHeads; ++h) {
          for (int64_t i = 0; i < piece.length; ++i) {
            for (int64_t j = 0; j < piece.length; ++j) {
              const bool kept = oracle::Keeps(problem_.terms.dropout, batch_row, h,
                                              piece.PositionOf(i), piece.PositionOf(j));
              const int64_t row = piece.local_begin + i, key = piece.local_begin + j;
              wrong += (out[at(b, row, h, key)] > 0) != kept;
              wrong += (dv[at(b, key, h, row)] > 0) != kept;
            }
          }
        }
      }
    }
    return wrong;
  }

  const DeviceInfo& device_;
  const DType dtype_;
  const Placing placing_;
  const int64_t batch_;
  const int64_t rows_, dim_;
  KernelTuning tuning_;
  AttentionProblem problem_;
};

}  // namespace

int CheckKeepSets(const DeviceInfo& device, const std::string& family) {
  const Placing placings[] = {
      {"from the start", 0, 1, false, false}, {"from the middle", 1'000'013, 1, false, false},
      {"strided", 5, 3, false, false},        {"strided by 8", 3, 8, false, true},
      {"origins", 11, 1, false, true},        {"packed", 7, 1, true, true},
  };
  int failed = 0;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (OnTensorCores(family) && dtype == DType::kFloat32) continue;
    for (const Placing& placing : placings) {
      const int64_t wrong = KeepSets(device, dtype, placing, family).Run();
      if (wrong == 0) continue;
      ++failed;
      std::printf("FAILED keep set, %s %s: %ld wrong pairs\n",
                  std::string(DTypeName(dtype)).c_str(), placing.name, wrong);
    }
  }
  std::printf("keep sets%s: %s\n", family.empty() ? "" : (" of " + family).c_str(),
              failed == 0 ? "passed" : "FAILED");
  return failed;
}

}  // namespace ringattn::worker::cuda::check
