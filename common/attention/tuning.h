// Tuning: a request's parameters for kernels. They change a result only by rounding.
#ifndef RINGATTN_COMMON_ATTENTION_TUNING_H_
#define RINGATTN_COMMON_ATTENTION_TUNING_H_

#include <cstdint>

namespace ringattn {

// 0: the kernel's choice.
struct Tuning {
  int32_t tile_q = 0;      // rows of a score tile: queries times the heads that share a K/V head
  int32_t tile_kv = 0;     // keys of a tile
  int32_t key_splits = 0;  // forward: maximum number of splits of a row's keys

  bool operator==(const Tuning&) const = default;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_ATTENTION_TUNING_H_
