// From a Reserve message to what the executor needs: spec, plan and this worker's
// program. The coordinator has validated the request; what is checked here only
// keeps a faulty or differently built one from doing harm.
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
  std::vector<int> members;  // generation ranks, by ring rank
};

// `rank` of `world_size`: this worker's place in the generation.
// INVALID_ARGUMENT, naming the field, if the message makes no sense or this worker is no member.
absl::StatusOr<ReservedProgram> DecodeReserve(const v1::Reserve& reserve, int rank, int world_size);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_RESERVE_DECODER_H_
