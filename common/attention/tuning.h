// Tuning: what a request tells kernels of their own work. Never changes a result beyond rounding.
#ifndef RINGATTN_COMMON_ATTENTION_TUNING_H_
#define RINGATTN_COMMON_ATTENTION_TUNING_H_

#include <cstdint>

namespace ringattn {

// 0: the kernels' own choice.
struct Tuning {
  int32_t tile_q = 0;   // rows of a tile of scores: queries times the heads that share a K/V head
  int32_t tile_kv = 0;  // keys of a tile
  int32_t key_splits = 0;  // forward: parts of one row's keys, at most

  bool operator==(const Tuning&) const = default;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_ATTENTION_TUNING_H_
