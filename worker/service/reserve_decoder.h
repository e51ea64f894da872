// Decodes a Reserve message into what the executor needs: spec, plan and this worker's program. The
// coordinator has validated the request. The checks here protect the worker from a faulty
// coordinator or one of another version.
#ifndef RINGATTN_WORKER_SERVICE_RESERVE_DECODER_H_
#define RINGATTN_WORKER_SERVICE_RESERVE_DECODER_H_

#include <vector>

#include "absl/status/statusor.h"
#include "common/attention/attention_spec.h"
#include "common/layout/shard_plan.h"
#include "common/schedule/schedule.h"
#include "ringattn/v1/worker_control.pb.h"

namespace ringattn::worker {

struct ReservedProgram {
  AttentionSpec spec;
  ShardPlan plan;
  Program program;           // this worker's
  std::vector<int> members;  // generation ranks by ring rank
};

// Decodes for the worker that is `rank` of `world_size` in the generation.
//   hosts  the hosts of the generation's ranks, by rank; empty: all ranks are on one host. They
//          decide which transfers are in which lane
//
// Returns
// INVALID_ARGUMENT, with the field's name, if the message is invalid or this worker is not a
// member.
absl::StatusOr<ReservedProgram> DecodeReserve(const v1::Reserve& reserve, int rank, int world_size,
                                              const std::vector<int>& hosts = {});

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_RESERVE_DECODER_H_
