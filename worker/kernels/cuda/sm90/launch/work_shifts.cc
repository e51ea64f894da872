#include "worker/kernels/cuda/sm90/launch/work_shifts.h"

#include <algorithm>
#include <cmath>

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr double kCyclesPerSecond = 1.75e9;
constexpr int64_t kShiftCycles = 3'500'000;  // 2 ms
// Blocks per shift that the launch is predicted to take. A launch that has too few is not divided
// at its end; blocks that find no items take microseconds.
constexpr double kSpare = 1.5;
constexpr double kMostShifts = 4096;

}  // namespace

ShiftedLaunch DivideIntoShifts(int64_t items, int32_t at_once, double seconds,
                               int64_t tuned_cycles) {
  const int64_t first = std::min<int64_t>(items, at_once);
  ShiftedLaunch launch;
  launch.blocks = static_cast<int32_t>(first);
  launch.shifts.first_blocks = static_cast<uint32_t>(first);
  if (tuned_cycles < 0 || items <= first) return launch;
  const int64_t shift_cycles = tuned_cycles > 0 ? tuned_cycles : kShiftCycles;
  const double shifts = seconds * kCyclesPerSecond / static_cast<double>(shift_cycles);
  if (shifts < 2) return launch;
  const auto rounds = static_cast<int64_t>(std::min(std::ceil(kSpare * shifts) + 1, kMostShifts));
  launch.blocks = static_cast<int32_t>(std::min(items, first * rounds));
  launch.shifts.cycles = static_cast<uint32_t>(shift_cycles);
  return launch;
}

}  // namespace ringattn::worker::cuda::sm90
