#include "worker/kernels/cuda/check/run_case.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>

#include "common/attention/dtype.h"
#include "common/attention/tensors.h"
#include "worker/kernels/cuda/check/case_memory.h"
#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/check/launch_and_wait.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {
namespace {

std::vector<float> ToFloats(DType dtype, const std::vector<char>& bits) {
  std::vector<float> result(bits.size() / ElementBytes(dtype));
  ConvertToFloat(dtype, bits.data(), result.data(), static_cast<int64_t>(result.size()));
  return result;
}

class CaseRun {
 public:
  CaseRun(const Case& c, const Expected& expected, const DeviceInfo& device, SplitCounts& splits)
      : case_(c),
        shape_(c.spec.shape),
        inputs_(expected.inputs),
        expected_(expected.result),
        device_(device),
        splits_(splits),
        problem_(ProblemOf(c.spec)),
        element_(ElementBytes(c.spec.dtype)),
        q_shards_(Cut(c.layout, c.world, shape_.cu_seqlens_q)),
        kv_shards_(Cut(c.layout, c.world * c.key_blocks, shape_.cu_seqlens_k)) {
    if (c.by_keys) pair_plan_.pair_axis = Axis::kKv;
    if (c.by_keys) CutTermsByKeys();
    if (c.small_device) device_.shared_bytes_per_block = 1024;
    if (c.few_sms) device_.sm_count = 1;
    const std::vector<double>& lse = expected_.lse.exact;
    has_empty_rows_ =
        std::find(lse.begin(), lse.end(), -std::numeric_limits<double>::infinity()) != lse.end();
  }

  CaseOutputs Run() {
    const int64_t q_rows = shape_.batch * shape_.seq_len_q * shape_.num_heads;
    const int64_t kv_rows = shape_.batch * shape_.seq_len_kv * shape_.num_kv_heads;
    outputs_.out.resize(q_rows * shape_.head_dim_v * element_);
    outputs_.lse.resize(q_rows);
    outputs_.dq.resize(q_rows * shape_.head_dim * element_);
    outputs_.dk.resize(kv_rows * shape_.head_dim * element_);
    outputs_.dv.resize(kv_rows * shape_.head_dim_v * element_);
    if (has_dbias()) outputs_.dbias.resize(LayoutOf(case_.spec, TensorId::kDbias).bytes());
    outputs_.probabilities.resize(case_.spec.probability_rows.size() * ChosenRowFloats());
    MakeBlocks();
    for (int rank = 0; rank < case_.world; ++rank) RunRank(rank);
    for (size_t shard = 0; shard < kv_shards_.size(); ++shard) {
      KvMemory& memory = *kv_memory_[shard];
      CollectKeyGradient(kv_shards_[shard], memory.dk, stored_ ? &memory.dk_out : nullptr,
                         shape_.head_dim, outputs_.dk);
      CollectKeyGradient(kv_shards_[shard], memory.dv, stored_ ? &memory.dv_out : nullptr,
                         shape_.head_dim_v, outputs_.dv);
      if (case_.by_keys) CollectDbias(kv_shards_[shard], *key_pairs_[shard]);
    }
    return std::move(outputs_);
  }

 private:
  // The chosen rows that a rank has: their locations, and their numbers among all chosen rows.
  struct ChosenRows {
    std::vector<ChosenRow> rows;
    std::vector<int64_t> numbers;
  };

  bool has_dbias() const {
    const auto& bias = case_.spec.options.bias;
    return bias.has_value() && bias->gradient;
  }
  int64_t ChosenRowFloats() const { return shape_.num_heads * ProbabilityColumns(case_.spec); }
  int steps() const { return case_.one_call ? 1 : case_.world; }
  int64_t QueryRowBytes(int64_t dim) const { return shape_.num_heads * dim * element_; }
  int64_t KeyRowBytes(int64_t dim) const { return shape_.num_kv_heads * dim * element_; }

  // Returns the key shard that a rank has in a step, if it has one block of keys.
  int ShardAt(int rank, int step) const { return (rank + case_.world - step) % case_.world; }
  std::vector<KvBlock> BlocksOf(int rank, int step) const {
    if (case_.one_call || case_.key_blocks > 1) return blocks_;
    return {blocks_[ShardAt(rank, step)]};
  }
  const AttentionProblem& ProblemAt(int rank, int step) const {
    return case_.by_keys ? key_problems_[ShardAt(rank, step)] : problem_;
  }
  // Returns the pairs of a step's call: those of its rank, or those of its keys if terms are
  // sharded by keys.
  const PairMemory& PairsAt(int rank, int step, const TermMemory& terms) const {
    return case_.by_keys ? *key_pairs_[ShardAt(rank, step)] : terms.pairs;
  }
  void Count(const PreparedKernel& kernel, const std::string& direction) {
    splits_.Count(kernel, direction);
    if (case_.by_keys) splits_.Count(kernel, direction + kByKeys);
  }

  void CutTermsByKeys() {
    for (const Shard& shard : kv_shards_) {
      ScoreTerms& terms = key_problems_.emplace_back(problem_).terms;
      terms.by_keys = true;
      terms.rows = shape_.seq_len_q;
      terms.columns = shard.rows();
    }
  }

  // Creates the pairs of each key shard.
  void MakeKeyPairs() {
    for (size_t i = 0; i < kv_shards_.size(); ++i) {
      const Shard& shard = kv_shards_[i];
      PairMemory& memory = *key_pairs_.emplace_back(
          std::make_unique<PairMemory>(case_.spec, pair_plan_, shard.rows()));
      UploadPairs(shard, pair_plan_, memory);
      if (has_dbias()) PlaceDbiasByKeys(static_cast<int>(i), memory);
    }
  }

  void UploadPairs(const Shard& shard, const ShardPlan& plan, PairMemory& memory) const {
    Upload(shard, plan, TensorId::kBias, inputs_.bias, memory.bias);
    Upload(shard, plan, TensorId::kMask, inputs_.mask, memory.mask);
  }
  void Upload(const Shard& shard, const ShardPlan& plan, TensorId id,
              const std::vector<char>& whole, Buffer& target) const {
    if (whole.empty()) return;
    const TensorLayout layout = LayoutOf(case_.spec, plan, id);
    target.Upload(Gather(whole, layout.outer, layout.rows, layout.inner_bytes, shard.tokens));
  }

  // As PlaceDbias, before the calls of all ranks.
  void PlaceDbiasByKeys(int index, PairMemory& memory) {
    std::vector<BiasGradientCall> calls;
    for (const Shard& queries : q_shards_) {
      BiasGradientCall& call = calls.emplace_back();
      call.problem = &key_problems_[index];
      call.q_rows = queries.rows();
      call.q_pieces = queries.pieces;
      call.blocks = {blocks_[index]};
      call.dbias = memory.dbias.get();
    }
    PlaceDbias(calls, DbiasBeforeByKeys(kv_shards_[index]), memory.dbias);
  }

  // Collects dbias of a shard of queries, or of keys if terms are sharded by keys.
  void CollectDbias(const Shard& shard, const PairMemory& memory) {
    if (!has_dbias()) return;
    const TensorLayout layout = LayoutOf(case_.spec, pair_plan_, TensorId::kDbias);
    Scatter(memory.dbias.Download<char>(), layout.outer, layout.rows, layout.inner_bytes,
            shard.tokens, outputs_.dbias);
    outputs_.intact = outputs_.intact && memory.dbias.GuardsIntact();
  }

  void MakeBlocks() {
    const int64_t d = shape_.head_dim, dv = shape_.head_dim_v;
    for (const Shard& shard : kv_shards_) {
      const int64_t rows = shape_.batch * shard.rows() * shape_.num_kv_heads;
      kv_memory_.push_back(
          std::make_unique<KvMemory>(rows * d, rows * dv, element_, shape_.batch * shard.rows()));
      KvMemory& memory = *kv_memory_.back();
      memory.k.Upload(
          Gather(inputs_.k, shape_.batch, shape_.seq_len_kv, KeyRowBytes(d), shard.tokens));
      memory.v.Upload(
          Gather(inputs_.v, shape_.batch, shape_.seq_len_kv, KeyRowBytes(dv), shard.tokens));
      Check(StartZero({memory.dk.get(), rows * d * 4}, nullptr));
      Check(StartZero({memory.dv.get(), rows * dv * 4}, nullptr));
      KvBlock block;
      block.rows = shard.rows();
      block.pieces = shard.pieces;
      block.k = memory.k.get();
      block.v = memory.v.get();
      block.dk = memory.dk.get<float>();
      block.dv = memory.dv.get<float>();
      if (case_.world == 1 && !case_.apart) {
        block.dk_out = memory.dk_out.get();
        block.dv_out = memory.dv_out.get();
      }
      if (problem_.terms.segment_ids) {
        memory.ids.Upload(
            Gather(inputs_.kv_segment_ids, shape_.batch, shape_.seq_len_kv, 4, shard.tokens));
        block.segment_ids = memory.ids.get<int32_t>();
      }
      blocks_.push_back(block);
    }
    if (case_.by_keys) MakeKeyPairs();
  }

  void RunRank(int rank) {
    const Shard& shard = q_shards_[rank];
    const int64_t d = shape_.head_dim, dv = shape_.head_dim_v, sq = shape_.seq_len_q;
    QueryMemory memory(shape_.batch * shape_.num_heads * shard.rows(), d, dv, element_);
    memory.q.Upload(Gather(inputs_.q, shape_.batch, sq, QueryRowBytes(d), shard.tokens));
    memory.dout.Upload(Gather(inputs_.dout, shape_.batch, sq, QueryRowBytes(dv), shard.tokens));
    TermMemory terms(case_.spec, shard.rows());
    UploadTerms(shard, terms);
    Forward(rank, memory, terms);
    Probabilities(rank, memory, terms);
    const std::vector<char> out = memory.out.Download<char>();
    Scatter(out, shape_.batch, sq, QueryRowBytes(dv), shard.tokens, outputs_.out);
    const std::vector<float> lse = memory.lse.Download<float>();
    ForStatistics(shard,
                  [&](int64_t local, int64_t, int64_t at) { outputs_.lse[at] = lse[local]; });
    CheckDelta(shard, memory, out);
    Backward(rank, memory, terms);
    Scatter(memory.dq.Download<char>(), shape_.batch, sq, QueryRowBytes(d), shard.tokens,
            outputs_.dq);
    if (!case_.by_keys) CollectDbias(shard, terms.pairs);
    outputs_.intact = outputs_.intact && memory.GuardsIntact();
  }

  void UploadTerms(const Shard& shard, TermMemory& terms) {
    UploadPairs(shard, ShardPlan(), terms.pairs);
    Upload(shard, ShardPlan(), TensorId::kQSegmentIds, inputs_.q_segment_ids, terms.q_ids);
    if (inputs_.sinks.empty() || sinks_ != nullptr) return;
    sinks_ = std::make_unique<Buffer>(inputs_.sinks.size() * 4);
    sinks_->Upload(inputs_.sinks);
  }

  // Calls use(local, row, global) with the indices of a row's statistic in the rank's lse, in the
  // rows of the oracle's out, and in the whole lse.
  template <typename Use>
  void ForStatistics(const Shard& shard, const Use& use) const {
    for (int64_t b = 0; b < shape_.batch; ++b) {
      for (int64_t h = 0; h < shape_.num_heads; ++h) {
        for (int64_t t = 0; t < shard.rows(); ++t) {
          const int64_t head = b * shape_.num_heads + h;
          use(head * shard.rows() + t,
              (b * shape_.seq_len_q + shard.tokens[t]) * shape_.num_heads + h,
              head * shape_.seq_len_q + shard.tokens[t]);
        }
      }
    }
  }

  void Forward(int rank, QueryMemory& memory, const TermMemory& terms) {
    for (int step = 0; step < steps(); ++step) {
      ForwardCall call;
      call.problem = &ProblemAt(rank, step);
      call.q_rows = q_shards_[rank].rows();
      call.q_pieces = q_shards_[rank].pieces;
      call.q = memory.q.get();
      call.blocks = BlocksOf(rank, step);
      call.out_acc = steps() == 1 ? nullptr : memory.out_acc.get<float>();
      call.lse = memory.lse.get<float>();
      call.out = memory.out.get();
      call.initial = step == 0;
      call.final = step == steps() - 1;
      call.terms = terms.OperandsOf(PairsAt(rank, step, terms));
      if (call.final && sinks_ != nullptr) call.sinks = sinks_->get<float>();
      MakeLate(call);
      const Prepared prepared = ByFamily(
          [&](const KernelTuning& tuning) { return PrepareForward(call, device_, tuning); });
      LaunchForward(prepared, call);
      Count(**prepared, "forward");
      // Only partial results need scratch.
      if ((*prepared)->scratch_bytes() > 0) splits_.AddSplit(case_, call, has_empty_rows_);
    }
  }

  // Marks the last of several blocks as late in some cases, or all but the first, each with a
  // separate arrival. In some of these they are so late that tiles are split.
  void MakeLate(ForwardCall& call) const {
    const size_t blocks = call.blocks.size();
    if (blocks < 2 || case_.seed % 3 == 0) return;
    if (call.blocks.back().rows == 0) return;  // nothing arrives that could be signalled
    const size_t late = case_.seed % 3 == 1 ? 1 : std::min<size_t>(blocks - 1, kMostArrivals);
    for (size_t i = 1; i <= late; ++i) {
      call.blocks[blocks - late - 1 + i].late = static_cast<int32_t>(i);
      call.late_after.push_back(absl::Microseconds(case_.seed / 3 % 4 * 20 * i));
    }
  }

  void LaunchForward(const Prepared& prepared, const ForwardCall& call) {
    Check(prepared.status());
    if (!(*prepared)->keys_word_offset().has_value()) return LaunchAndWait(prepared);
    LateKeys late;
    for (const KvBlock& block : call.blocks) {
      if (block.late == 0) continue;
      const int64_t heads = shape_.batch * block.rows * shape_.num_kv_heads;
      late.Take(const_cast<void*>(block.k), heads * shape_.head_dim * element_, block.late);
      late.Take(const_cast<void*>(block.v), heads * shape_.head_dim_v * element_, block.late);
    }
    LaunchAndWait(prepared, /*stop_word=*/nullptr, &late);
    splits_.Count(**prepared, kLateKeys);
  }

  ChosenRows ChosenOf(const Shard& shard) const {
    ChosenRows chosen;
    for (size_t i = 0; i < case_.spec.probability_rows.size(); ++i) {
      const ProbabilityRow& row = case_.spec.probability_rows[i];
      const int64_t token = (shape_.packed ? shape_.cu_seqlens_q[row.batch] : 0) + row.position;
      const auto at = std::find(shard.tokens.begin(), shard.tokens.end(), token);
      if (at == shard.tokens.end()) continue;
      chosen.rows.push_back({shape_.packed ? 0 : row.batch, at - shard.tokens.begin()});
      chosen.numbers.push_back(static_cast<int64_t>(i));
    }
    return chosen;
  }

  // Computes the probabilities with the forward's lse.
  void Probabilities(int rank, QueryMemory& memory, const TermMemory& terms) {
    const ChosenRows chosen = ChosenOf(q_shards_[rank]);
    if (chosen.rows.empty()) return;
    const int64_t floats = ChosenRowFloats();
    Buffer target(chosen.rows.size() * floats * 4);
    for (int step = 0; step < steps(); ++step) {
      ProbabilitiesCall call;
      call.problem = &problem_;
      call.q_rows = q_shards_[rank].rows();
      call.q_pieces = q_shards_[rank].pieces;
      call.q = memory.q.get();
      call.blocks = BlocksOf(rank, step);
      call.terms = terms.OperandsOf(terms.pairs);
      call.rows = chosen.rows;
      call.columns = ProbabilityColumns(case_.spec);
      call.target = target.get<float>();
      call.lse = memory.lse.get<float>();
      call.initial = step == 0;
      call.final = step == steps() - 1;
      const Prepared prepared = PrepareProbabilities(call, device_);
      LaunchAndWait(prepared);
      splits_.Count(**prepared, "probabilities");
    }
    const std::vector<float> found = target.Download<float>();
    for (size_t i = 0; i < chosen.numbers.size(); ++i) {
      std::copy_n(found.begin() + i * floats, floats,
                  outputs_.probabilities.begin() + chosen.numbers[i] * floats);
    }
    outputs_.intact = outputs_.intact && target.GuardsIntact();
  }

  // Runs prepare(tuning) with the case's family, or with any family if that one does not take the
  // call. The run's counts show which calls a family computed.
  template <typename Prepare>
  Prepared ByFamily(const Prepare& prepare) const {
    KernelTuning tuning;
    tuning.long_keys = case_.long_keys ? 1 : 0;
    tuning.shift_cycles = case_.short_shifts ? 1 : 0;
    tuning.family = case_.family;
    Prepared prepared = prepare(tuning);
    if (case_.family.empty() || !absl::IsInvalidArgument(prepared.status())) return prepared;
    tuning.family = "";
    return prepare(tuning);
  }

  // Also sets dq's sums to 0.
  void CheckDelta(const Shard& shard, QueryMemory& memory, const std::vector<char>& out_bits) {
    const int64_t dv = shape_.head_dim_v;
    Check(StartDelta(
        {&problem_, shard.rows(), memory.out.get(), memory.dout.get(), memory.delta.get<float>(),
         /*dlse=*/nullptr, /*lse=*/nullptr, memory.dq_acc.get<float>()},
        nullptr));
    const std::vector<float> delta = memory.delta.Download<float>();
    const std::vector<float> out = ToFloats(problem_.dtype, out_bits);
    const std::vector<float> dout = ToFloats(problem_.dtype, memory.dout.Download<char>());
    const int64_t n = shard.rows();
    for (size_t local = 0; local < delta.size(); ++local) {
      const int64_t head = static_cast<int64_t>(local) / n, t = static_cast<int64_t>(local) % n;
      const int64_t b = head / shape_.num_heads, h = head % shape_.num_heads;
      const int64_t row = ((b * n + t) * shape_.num_heads + h) * dv;
      double sum = 0, magnitude = 0;
      for (int64_t i = row; i < row + dv; ++i) {
        sum += static_cast<double>(out[i]) * dout[i];
        magnitude += std::fabs(static_cast<double>(out[i]) * dout[i]);
      }
      if (std::fabs(delta[local] - sum) <= 1e-5 * magnitude + 1e-30) continue;
      if (case_.hostile && std::isnan(sum) && std::isnan(delta[local])) continue;
      std::printf("delta differs: %g, expected %g\n", delta[local], sum);
      outputs_.intact = false;
    }
  }

  double ExactDelta(int64_t row, const std::vector<float>& dout, int64_t dout_at) const {
    double sum = 0;
    for (int64_t i = 0; i < shape_.head_dim_v; ++i) {
      sum += expected_.out.exact[row * shape_.head_dim_v + i] * dout[dout_at + i];
    }
    return sum;
  }

  void Backward(int rank, QueryMemory& memory, TermMemory& terms) {
    const Shard& shard = q_shards_[rank];
    const int64_t rows = shape_.batch * shape_.num_heads * shard.rows();
    const std::vector<float> dout = ToFloats(problem_.dtype, inputs_.dout);
    std::vector<float> lse(rows), delta(rows);
    ForStatistics(shard, [&](int64_t local, int64_t row, int64_t) {
      lse[local] = static_cast<float>(expected_.lse.exact[row]);
      delta[local] = static_cast<float>(ExactDelta(row, dout, row * shape_.head_dim_v));
    });
    memory.lse.Upload(lse);
    memory.delta.Upload(delta);
    std::vector<BackwardCall> calls;
    for (int step = 0; step < steps(); ++step) {
      BackwardCall& call = calls.emplace_back();
      call.problem = &ProblemAt(rank, step);
      call.q_rows = shard.rows();
      call.q_pieces = shard.pieces;
      call.q = memory.q.get();
      call.dout = memory.dout.get();
      call.lse = memory.lse.get<float>();
      call.delta = memory.delta.get<float>();
      call.dq_acc = memory.dq_acc.get<float>();
      call.blocks = BlocksOf(rank, step);
      call.terms = terms.OperandsOf(PairsAt(rank, step, terms));
    }
    std::vector<BiasGradientCall> gradients;
    for (int step = 0; has_dbias() && step < steps(); ++step) {
      gradients.push_back(BiasGradientOf(calls[step], PairsAt(rank, step, terms).dbias.get()));
    }
    if (has_dbias() && !case_.by_keys) PlaceDbias(gradients, DbiasBefore(shard), terms.pairs.dbias);
    for (int step = 0; step < steps(); ++step) {
      const BackwardCall& call = calls[step];
      if (has_dbias() && BothGradients(call, gradients[step])) continue;
      const Prepared prepared = ByFamily(
          [&](const KernelTuning& tuning) { return PrepareBackward(call, device_, tuning); });
      LaunchAndWait(prepared);
      Count(**prepared, "backward");
      if ((*prepared)->stores_key_gradients()) {
        stored_ = true;
        splits_.AddStoring(**prepared, case_);
      }
      if (has_dbias()) BiasGradient(gradients[step]);
    }
    Check(StartConvert(
        {problem_.dtype, memory.dq.get(), memory.dq_acc.get<float>(), rows * shape_.head_dim},
        nullptr));
  }

  static BiasGradientCall BiasGradientOf(const BackwardCall& backward, void* dbias) {
    BiasGradientCall call;
    call.problem = backward.problem;
    call.q_rows = backward.q_rows;
    call.q_pieces = backward.q_pieces;
    call.q = backward.q;
    call.dout = backward.dout;
    call.lse = backward.lse;
    call.delta = backward.delta;
    call.blocks = backward.blocks;
    call.terms = backward.terms;
    call.dbias = dbias;
    return call;
  }

  // Computes both gradients by one kernel, if the case requests it and a kernel can; returns false
  // if not.
  bool BothGradients(const BackwardCall& call, const BiasGradientCall& gradient) {
    if (case_.apart) return false;
    const KernelTuning tuning{.family = case_.family};
    absl::StatusOr<PreparedGradients> both = PrepareGradients(call, gradient, device_, tuning);
    if (absl::IsInvalidArgument(both.status())) return false;  // another family computes it
    Check(both.status());
    if (both->backward == nullptr) return false;
    const Prepared prepared = std::move(both->backward);
    LaunchAndWait(prepared);
    Count(**prepared, "backward");
    Count(**prepared, "backward with dbias");
    LaunchAndWait(Prepared(std::move(both->bias_gradient)));
    return true;
  }

  void BiasGradient(const BiasGradientCall& call) {
    const Prepared prepared = ByFamily(
        [&](const KernelTuning& tuning) { return PrepareBiasGradient(call, device_, tuning); });
    LaunchAndWait(prepared);
    Count(**prepared, "bias gradient");
  }

  // Uploads NaN and runs the zeroing kernel that knows the calls. If there is none for these calls,
  // uploads `before`.
  void PlaceDbias(const std::vector<BiasGradientCall>& gradients, std::vector<char> before,
                  Buffer& dbias) {
    std::vector<const BiasGradientCall*> behind;
    for (const BiasGradientCall& gradient : gradients) behind.push_back(&gradient);
    const int64_t bytes = static_cast<int64_t>(before.size());
    Prepared zero = PrepareZero({dbias.get(), bytes}, behind);
    if (*zero == nullptr) return dbias.Upload(before);
    std::fill(before.begin(), before.end(), static_cast<char>(0xff));
    dbias.Upload(before);
    LaunchAndWait(zero);
    Count(**zero, "partial zeros of dbias");
  }

  // As DbiasBefore, for a key shard.
  std::vector<char> DbiasBeforeByKeys(const Shard& shard) const {
    const TensorLayout layout = LayoutOf(case_.spec, pair_plan_, TensorId::kDbias);
    const int64_t rows = layout.outer, element = layout.inner_bytes;
    const Band& band = problem_.bands[0];
    std::vector<char> before(rows * shard.rows() * element, 0);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t j = 0; j < shard.rows(); ++j) {
        const int64_t away = shard.tokens[j] - row % shape_.seq_len_q;
        if (away < band.lower || away > band.upper) continue;
        std::fill_n(before.begin() + (row * shard.rows() + j) * element, element,
                    static_cast<char>(0xff));
      }
    }
    return before;
  }

  // Returns the contents of a rank's dbias before its calls: NaN at pairs that the band shows,
  // whose elements the calls must store over any value, and 0 elsewhere.
  std::vector<char> DbiasBefore(const Shard& shard) const {
    const TensorLayout layout = LayoutOf(case_.spec, TensorId::kDbias);
    const int64_t row_bytes = layout.inner_bytes;
    const int64_t element = ElementBytes(DTypeOf(case_.spec, TensorId::kDbias));
    std::vector<char> before(layout.outer * shard.rows() * row_bytes, 0);
    for (const Piece& piece : shard.pieces) {
      const Band& band = problem_.bands[piece.document];
      const int64_t keys =
          shape_.cu_seqlens_k[piece.document + 1] - shape_.cu_seqlens_k[piece.document];
      for (int64_t r = 0; r < piece.length; ++r) {
        const int64_t position = piece.PositionOf(r);
        const int64_t begin = std::max<int64_t>(position + band.lower, 0);
        const int64_t end = std::min(position + band.upper + 1, keys);
        for (int64_t plane = 0; plane < layout.outer && begin < end; ++plane) {
          const int64_t row = (plane * shard.rows() + piece.local_begin + r) * row_bytes;
          std::memset(before.data() + row + begin * element, 0xff, (end - begin) * element);
        }
      }
    }
    return before;
  }

  // Collects the gradient of a key shard. `stored`: the stored gradient, or null if it is in
  // `sums`.
  void CollectKeyGradient(const Shard& shard, const Buffer& sums, const Buffer* stored, int64_t dim,
                          std::vector<char>& target) {
    const int64_t count = shape_.batch * shard.rows() * shape_.num_kv_heads * dim;
    Buffer rounded(count * element_);
    if (stored == nullptr) {
      Check(StartConvert({problem_.dtype, rounded.get(), sums.get<float>(), count}, nullptr));
    }
    const Buffer& converted = stored == nullptr ? rounded : *stored;
    Scatter(converted.Download<char>(), shape_.batch, shape_.seq_len_kv, KeyRowBytes(dim),
            shard.tokens, target);
    outputs_.intact = outputs_.intact && sums.GuardsIntact() && converted.GuardsIntact();
  }

  const Case& case_;
  const AttentionShape& shape_;
  ShardPlan pair_plan_;  // only its pair_axis is used
  const CaseInputs& inputs_;
  const oracle::Result& expected_;
  DeviceInfo device_;
  SplitCounts& splits_;
  const AttentionProblem problem_;
  const int64_t element_;
  const std::vector<Shard> q_shards_;
  const std::vector<Shard> kv_shards_;
  bool has_empty_rows_ = false;
  bool stored_ = false;                               // dk_out and dv_out instead of dk and dv
  std::vector<std::unique_ptr<KvMemory>> kv_memory_;  // one per shard of kv_shards_
  std::vector<KvBlock> blocks_;                       // one per shard of kv_shards_
  // One per shard of kv_shards_ if terms are sharded by keys.
  std::vector<AttentionProblem> key_problems_;
  std::vector<std::unique_ptr<PairMemory>> key_pairs_;
  std::unique_ptr<Buffer> sinks_;
  CaseOutputs outputs_;
};

}  // namespace

bool CaseOutputs::operator==(const CaseOutputs& other) const {
  const auto same = [](const auto& a, const auto& b) {
    return a.size() == b.size() &&
           (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0);
  };
  return same(out, other.out) && same(dq, other.dq) && same(dk, other.dk) && same(dv, other.dv) &&
         same(dbias, other.dbias) && same(lse, other.lse) &&
         same(probabilities, other.probabilities) && intact == other.intact;
}

CaseOutputs RunCase(const Case& c, const Expected& expected, const DeviceInfo& device,
                    SplitCounts& splits) {
  return CaseRun(c, expected, device, splits).Run();
}

}  // namespace ringattn::worker::cuda::check
