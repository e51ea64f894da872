// InParallel: runs independent pieces of the oracle's work on all processors.
#ifndef RINGATTN_COMMON_ORACLE_IN_PARALLEL_H_
#define RINGATTN_COMMON_ORACLE_IN_PARALLEL_H_

#include <cstdint>
#include <functional>

namespace ringattn::oracle {

// Calls work(i) once for each i in [0, count) and returns when all have returned. Order and threads
// are unspecified, so `work` must not write data that another i reads or writes.
//   cost  of one i, in multiplications; small amounts of work start no thread
void InParallel(int64_t count, double cost, const std::function<void(int64_t)>& work);

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_IN_PARALLEL_H_
