// The factor of time limits in tests.
#ifndef RINGATTN_COMMON_BASE_TESTING_TIME_FACTOR_H_
#define RINGATTN_COMMON_BASE_TESTING_TIME_FACTOR_H_

#include "absl/base/config.h"

namespace ringattn {

// Sanitizers make the same code two to three times slower.
#ifdef ABSL_HAVE_ADDRESS_SANITIZER
inline constexpr double kTimeFactor = 4;
#else
inline constexpr double kTimeFactor = 1;
#endif

}  // namespace ringattn

#endif  // RINGATTN_COMMON_BASE_TESTING_TIME_FACTOR_H_
