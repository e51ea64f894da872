#include "worker/kernels/cuda/check/shards.h"

#include <algorithm>
#include <cstring>

namespace ringattn::worker::cuda::check {
namespace {

void AddSpan(Shard& shard, int64_t begin, int64_t end, int64_t stride,
             const std::vector<int64_t>& cu) {
  int64_t token = begin;
  while (token < end) {
    const int64_t document = std::upper_bound(cu.begin(), cu.end(), token) - cu.begin() - 1;
    Piece piece;
    piece.local_begin = shard.rows();
    piece.document = document;
    piece.position = token - cu[document];
    piece.stride = stride;
    for (; token < end && token < cu[document + 1]; token += stride) {
      shard.tokens.push_back(token);
      ++piece.length;
    }
    shard.pieces.push_back(piece);
  }
}

}  // namespace

std::vector<Shard> Cut(Layout layout, int world, const std::vector<int64_t>& cu) {
  const int64_t n = cu.back();
  std::vector<Shard> shards(world);
  for (int r = 0; r < world; ++r) {
    if (layout == Layout::kContiguous) {
      AddSpan(shards[r], n * r / world, n * (r + 1) / world, 1, cu);
    } else if (layout == Layout::kZigzag) {
      const int other = 2 * world - 1 - r;
      AddSpan(shards[r], n * r / (2 * world), n * (r + 1) / (2 * world), 1, cu);
      AddSpan(shards[r], n * other / (2 * world), n * (other + 1) / (2 * world), 1, cu);
    } else {
      AddSpan(shards[r], r, n, world, cu);
    }
  }
  return shards;
}

std::vector<char> Gather(const std::vector<char>& source, int64_t batch, int64_t total,
                         int64_t row_bytes, const std::vector<int64_t>& tokens) {
  const int64_t count = static_cast<int64_t>(tokens.size());
  std::vector<char> result(batch * count * row_bytes);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < count; ++t) {
      std::memcpy(result.data() + (b * count + t) * row_bytes,
                  source.data() + (b * total + tokens[t]) * row_bytes, row_bytes);
    }
  }
  return result;
}

void Scatter(const std::vector<char>& rows, int64_t batch, int64_t total, int64_t row_bytes,
             const std::vector<int64_t>& tokens, std::vector<char>& target) {
  const int64_t count = static_cast<int64_t>(tokens.size());
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < count; ++t) {
      std::memcpy(target.data() + (b * total + tokens[t]) * row_bytes,
                  rows.data() + (b * count + t) * row_bytes, row_bytes);
    }
  }
}

}  // namespace ringattn::worker::cuda::check
