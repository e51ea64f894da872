// The only source of random numbers in a simulation, so that a seed reproduces the whole run. (The
// standard distributions differ between libraries.)
#ifndef RINGATTN_TESTS_SIMULATION_RANDOM_H_
#define RINGATTN_TESTS_SIMULATION_RANDOM_H_

#include <cstdint>

#include "absl/time/time.h"

namespace ringattn::server::simulation {

// splitmix64. Not thread safe.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // In [0, bound). REQUIRES: bound > 0.
  int64_t Below(int64_t bound) { return static_cast<int64_t>(Next() % bound); }
  bool OneIn(int64_t n) { return Below(n) == 0; }
  absl::Duration Between(absl::Duration low, absl::Duration high) {
    const double unit = static_cast<double>(Next() >> 11) / (uint64_t{1} << 53);
    return low + unit * (high - low);
  }

 private:
  uint64_t state_;
};

}  // namespace ringattn::server::simulation

#endif  // RINGATTN_TESTS_SIMULATION_RANDOM_H_
