// The version of everything built from this tree. The coordinator and all workers of a cluster must
// have the same one.
#ifndef RINGATTN_COMMON_BASE_VERSION_H_
#define RINGATTN_COMMON_BASE_VERSION_H_

namespace ringattn {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace ringattn

#endif  // RINGATTN_COMMON_BASE_VERSION_H_
