#include "client/cli/shard_form.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"

namespace ringattn::client::cli {

std::vector<uint8_t> PartOfPacked(const AttentionSpec& spec, TensorId id, ConstBytes bytes) {
  const std::vector<TensorId> parts = PartsOf(ClientTensorOf(spec, id));
  const auto part = std::find(parts.begin(), parts.end(), id) - parts.begin();
  const TensorLayout layout = LayoutOf(spec, id);
  const auto row_bytes = static_cast<size_t>(layout.inner_bytes);
  std::vector<uint8_t> apart(layout.bytes());
  for (size_t at = 0, from = part * row_bytes; at < apart.size();
       at += row_bytes, from += parts.size() * row_bytes) {
    std::memcpy(apart.data() + at, bytes.data() + from, row_bytes);
  }
  return apart;
}

absl::StatusOr<std::vector<uint8_t>> FlatOfDocuments(const AttentionSpec& spec, TensorId id,
                                                     ConstBytes bytes, bool holes_are_empty) {
  const AttentionShape& shape = spec.shape;
  const auto longest = static_cast<size_t>(LongestQueries(shape));
  const auto heads = static_cast<size_t>(shape.num_heads);
  const auto tokens = static_cast<size_t>(shape.seq_len_q);
  std::vector<uint8_t> flat(heads * tokens * sizeof(float));
  for (int64_t d = 0; d < shape.num_documents(); ++d) {
    const auto begin = static_cast<size_t>(shape.cu_seqlens_q[d]);
    const size_t length = static_cast<size_t>(shape.cu_seqlens_q[d + 1]) - begin;
    for (size_t h = 0; h < heads; ++h) {
      const uint8_t* row = bytes.data() + (d * heads + h) * longest * sizeof(float);
      if (length > 0) {
        std::memcpy(flat.data() + (h * tokens + begin) * sizeof(float), row,
                    length * sizeof(float));
      }
      for (size_t i = length; holes_are_empty && i < longest; ++i) {
        float hole;
        std::memcpy(&hole, row + i * sizeof(float), sizeof(hole));
        if (hole == -std::numeric_limits<float>::infinity()) continue;
        return absl::InvalidArgumentError(absl::StrCat(TensorName(id), " has ", hole,
                                                       " after the end of document ", d, ", head ",
                                                       h, "; the padding must be -inf"));
      }
    }
  }
  return flat;
}

}  // namespace ringattn::client::cli
