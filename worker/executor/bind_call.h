// From a program's compute call to the kernel call: names become addresses.
#ifndef RINGATTN_WORKER_EXECUTOR_BIND_CALL_H_
#define RINGATTN_WORKER_EXECUTOR_BIND_CALL_H_

#include <string>
#include <vector>

#include "worker/executor/executor.h"
#include "worker/executor/hazard_tracker.h"

namespace ringattn::worker {

// Per operation and rank; calls refer to its problem.
struct BindContext {
  AttentionProblem problem;
  int64_t q_rows = 0;
  std::vector<Piece> q_pieces;
  std::vector<std::vector<Piece>> kv_pieces;  // by source rank
};
BindContext MakeBindContext(const Operation& operation);

struct BoundCall {
  KernelCall call;               // refers to the context's problem
  std::vector<Access> accesses;  // what it reads and writes
  std::string name;              // "forward", "backward", ...
};
BoundCall BindCall(const BindContext& context, const Operation& operation, const ComputeCall& call);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_EXECUTOR_BIND_CALL_H_
