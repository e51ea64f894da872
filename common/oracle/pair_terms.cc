#include "common/oracle/pair_terms.h"

#include <cmath>
#include <limits>

#include "common/attention/tensors.h"
#include "common/oracle/numeric.h"
#include "common/oracle/oracle.h"

namespace ringattn::oracle {

std::array<uint32_t, 4> Philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t second = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {
        static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(second),
        static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(first)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

bool Keeps(const DropoutForm& dropout, int64_t batch, int64_t head, int64_t i, int64_t j) {
  if (dropout.threshold == 0) return true;
  const int64_t key = j + dropout.first_key;
  const auto word = [](int64_t value) { return static_cast<uint32_t>(value); };
  const std::array<uint32_t, 4> bits = Philox(
      {word(4 * (key / 32) + key / 2 % 4), word(i + dropout.first_query),
       word(dropout.first_head + head * dropout.head_step), word(batch + dropout.first_batch)},
      {static_cast<uint32_t>(dropout.seed), static_cast<uint32_t>(dropout.seed >> 32)});
  const int64_t lane = 2 * (key / 8 % 4) + key % 2;
  const uint32_t lane_bits = bits[lane / 2] >> (16 * (lane % 2)) & 0xffff;
  return lane_bits >= dropout.threshold;
}

PairContext PairTerms::Look(const QueryPosition& query, int64_t j) const {
  const AttentionShape& shape = spec_.shape;
  const AttentionOptions& options = spec_.options;
  const int64_t batch_row = shape.packed ? query.document : query.batch;
  PairContext pair;
  pair.times = LevelsThatSelect(query, j);
  pair.visible = pair.times > 0 && MaskAllows(query, j) && IdsAllow(query, j);
  if (!options.alibi_slopes.empty()) {
    const int64_t d = query.document;
    const int64_t shift = (shape.cu_seqlens_k[d + 1] - shape.cu_seqlens_k[d]) -
                          (shape.cu_seqlens_q[d + 1] - shape.cu_seqlens_q[d]);
    const bool one_per_head = static_cast<int64_t>(options.alibi_slopes.size()) == shape.num_heads;
    const double slope =
        options.alibi_slopes[(one_per_head ? 0 : batch_row * shape.num_heads) + query.head];
    pair.after_softcap -= slope * static_cast<double>(std::abs(query.i + shift - j));
  }
  if (options.bias.has_value()) {
    const double bias = BiasOf(query, j);
    if (bias == -std::numeric_limits<double>::infinity()) pair.visible = false;
    (options.bias->before_softcap ? pair.before_softcap : pair.after_softcap) += bias;
  }
  if (options.dropout.threshold != 0) {
    const bool keeps = Keeps(options.dropout, batch_row, query.head, query.i, j);
    pair.keep = keeps ? 65536.0 / (65536.0 - options.dropout.threshold) : 0.0;
  }
  return pair;
}

double PairTerms::BiasOf(const QueryPosition& query, int64_t j) const {
  const AttentionShape& shape = spec_.shape;
  const BiasForm& bias = *spec_.options.bias;
  const int64_t heads = bias.per_head ? shape.num_heads : 1;
  const int64_t plane =
      (bias.per_batch ? query.batch : 0) * heads + (bias.per_head ? query.head : 0);
  const int64_t row = plane * shape.seq_len_q + shape.cu_seqlens_q[query.document] + query.i;
  return Load(DTypeOf(spec_, TensorId::kBias), inputs_.bias, row * PairColumns(shape) + j);
}

bool PairTerms::MaskAllows(const QueryPosition& query, int64_t j) const {
  if (!spec_.options.mask.has_value()) return true;
  const AttentionShape& shape = spec_.shape;
  const MaskForm& mask = *spec_.options.mask;
  const int64_t heads = mask.per_head ? shape.num_heads : 1;
  const int64_t plane =
      (mask.per_batch ? query.batch : 0) * heads + (mask.per_head ? query.head : 0);
  const int64_t row = plane * shape.seq_len_q + shape.cu_seqlens_q[query.document] + query.i;
  const int64_t columns = PairColumns(shape);
  if (!mask.bits) return inputs_.mask[row * columns + j] != 0;
  return (inputs_.mask[row * ((columns + 7) / 8) + j / 8] >> (j % 8) & 1) != 0;
}

bool PairTerms::IdsAllow(const QueryPosition& query, int64_t j) const {
  if (!spec_.options.segment_ids) return true;
  const AttentionShape& shape = spec_.shape;
  const int32_t q_id = inputs_.q_segment_ids[query.batch * shape.seq_len_q +
                                             shape.cu_seqlens_q[query.document] + query.i];
  const int32_t k_id =
      inputs_
          .kv_segment_ids[query.batch * shape.seq_len_kv + shape.cu_seqlens_k[query.document] + j];
  return q_id >= 0 && q_id == k_id;
}

int64_t PairTerms::LevelsThatSelect(const QueryPosition& query, int64_t j) const {
  if (spec_.options.dilation_levels.empty()) return 1;
  int64_t levels = 0;
  for (const DilationLevel& level : spec_.options.dilation_levels) {
    if (query.head < level.head_begin || query.head >= level.head_end) continue;
    const int64_t length = level.segment_length, rate = level.dilation_rate;
    const int64_t offset = level.offset.value_or(query.head % rate);
    const auto is_selected = [&](int64_t position) { return position % length % rate == offset; };
    if (query.i / length == j / length && is_selected(query.i) && is_selected(j)) ++levels;
  }
  return levels;
}

int64_t BiasRow(const AttentionSpec& spec, int64_t batch, int64_t token, int64_t head) {
  const BiasForm& bias = *spec.options.bias;
  const int64_t heads = bias.per_head ? spec.shape.num_heads : 1;
  return ((bias.per_batch ? batch : 0) * spec.shape.seq_len_q + token) * heads +
         (bias.per_head ? head : 0);
}

}  // namespace ringattn::oracle
