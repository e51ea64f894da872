// InParallel: independent pieces of the oracle's work on as many threads as there are processors.
#ifndef RINGATTN_COMMON_ORACLE_IN_PARALLEL_H_
#define RINGATTN_COMMON_ORACLE_IN_PARALLEL_H_

#include <cstdint>
#include <functional>

namespace ringattn::oracle {

// Calls work(i) once for each i in [0, count) and returns when all have returned; in which order
// and on which threads is not said, so `work` writes nothing that another i reads or writes.
//   cost  of one i, in multiplications or what takes as long: of little work no thread is started
void InParallel(int64_t count, double cost, const std::function<void(int64_t)>& work);

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_IN_PARALLEL_H_
