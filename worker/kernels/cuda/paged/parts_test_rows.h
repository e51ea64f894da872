// Rows of caches that hold one position part, and what their queries see, by plain loops.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_PARTS_TEST_ROWS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_PARTS_TEST_ROWS_H_

#include <cstdint>
#include <random>
#include <vector>

#include "worker/kernels/cuda/paged/work_split.h"

namespace ringattn::worker::cuda::paged {

// A random sequence, and the row of one part of it.
struct PartCase {
  MaskRule mask;
  PagedRow row;
  int32_t length = 0;           // of the whole sequence
  std::vector<int32_t> places;  // in the sequence, of each local entry

  int32_t position(int32_t query) const { return length - row.q_tokens + query; }
  bool Sees(int32_t query, int32_t local) const {
    const int32_t place = places[local];
    if (mask.causal != 0 && place > position(query)) return false;
    return mask.window_left < 0 || place >= int64_t{position(query)} - mask.window_left;
  }
};

inline PartCase DrawPartCase(std::mt19937& random, int32_t most_queries, int32_t most_parts) {
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  PartCase c;
  PartRule& part = c.mask.part;
  part.count = draw(1, most_parts);
  part.index = draw(0, part.count - 1);
  part.block_shift = draw(4, 6);
  c.mask.causal = draw(0, 4) == 0 ? 0 : 1;
  c.mask.window_left = draw(0, 1) == 0 ? draw(0, 400) : -1;
  c.length = draw(0, 1) == 0 ? draw(0, 60) : draw(0, 1500);
  c.row.q_tokens = draw(1, most_queries);
  const int32_t keep = draw(0, c.length);
  for (int32_t p = 0; p < c.length; ++p) {
    if ((p >> part.block_shift) % part.count != part.index) continue;
    c.places.push_back(p);
    ++(p < keep ? c.row.keep_length : c.row.append_tokens);
  }
  c.row.first_position = c.length - c.row.q_tokens;
  return c;
}

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_PARTS_TEST_ROWS_H_
