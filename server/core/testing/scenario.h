// Scenario tests of the coordinator's core as text files, in the style of etcd/raft's datadriven
// tests. A file holds scenarios; each starts with an empty coordinator. Blocks of commands are
// followed by "----" and the trace: the coordinator's actions, one per line, up to a blank line.
// Only the last command of a block may cause actions. "#" starts a comment.
//
//   # The coordinator accepts a request once all members have reserved memory.
//   scenario AcceptedByAllMembers
//   ring a b
//   request s1 tokens=100 world=2
//   ----
//   a b: reserve 1-1 [0 1]
//
//   a reserved 1-1
//   b reserved 1-1
//   ----
//   s1: accepted 1-1 on a b
//
// Workers send heartbeats and answer Prepare, Commit, Teardown and Release automatically, without a
// line in the trace, until `manual NAME`. They answer Reserve, Run and Cancel by command only. Time
// advances only by `wait` (in ticks) and `pause` (at once). Operations are named GENERATION-NUMBER.
//
// Structure
//   scenario NAME [max_operations_per_worker=N] [max_queued_requests=N]
//            [max_queued_requests_per_client=N] [assembly_time_max=D] [run_time_floor=D]
//            [max_kv_caches=N] [preempt_after=D] [loss_drain_timeout=D]
//   repeat N COMMAND ; COMMAND ...      % in a command is replaced by 1 to N
// Workers
//   join NAME [version=V] [tile_q=N] [memory=BYTES] [flops=F] [flops_bf16=F] [flops_terms=F]
//        [host=H] [zone=Z] [domain=D] [slot=N] [probe=false]
//        [call=S] [device=D] [options=FIELD] [kv=BYTES] [holds=C:RANK:EPOCH:COMMITTED:A,B,...]
//                         kv: memory for K/V caches. holds: ranks of an earlier coordinator's
//                         caches clients cannot reach workers whose name begins with "hidden"
//   ring NAME...          joins and forms a ring; without a trace
//   disconnect NAME       the control stream ends
//   manual NAME...        no automatic answers from now on
//   silent NAME...        no messages from now on
//   cut A B   heal A B    the workers cannot reach each other: rings with both fail, and probes
//   NAME prepared G | torn_down G | leaving | probed ID
//   NAME committed G [link=BYTES/S] [exchange=S] [host_link=BYTES/S] [host_exchange=S]
//   [host_total=BYTES/S] NAME generation_failed G [unreached=RANK,...] REASON NAME reserved OP
//   [residual=BYTES] | rejected OP [workspace=BYTES] REASON NAME residual_missing OP | malformed OP
//   REASON         other forms of a rejected Reserve NAME uploaded OP | released OP | delivered OP
//   NAME finished OP | cancelled OP | failed OP REASON     the end of a run
//   NAME finished OP output=TEXT [workspace=BYTES]         of an inline operation
//   NAME transferred OP RECEIVED SENT [waits]              progress of direct and local transfers
//   NAME region_released OP | transfer_failed OP REASON | bad_chunk OP REASON
//   NAME at OP STEP PROGRESS [waits]                       in all later heartbeats
// Requests; S names a stream
//   request S [id=ID] [principal=P] [client=C] [header=N] [tokens=N] [dtype=bf16] [world=N]
//             [deadline=D] [members=A,B,...] [tile_q=N] [option=segment_ids]
//             [weight=X] [in_flight=N] [queued_bytes=N] [residual_bytes=N]   the client's terms
//             [segment_length=N]            one dilated level
//             [inline=TEXT]                 the header carries all inputs
//             [region=R [required=1]]       all tensors are in region R
//             [direct=1 [required=1]]       the client can stream to workers
//             [retain=TTL]                  a Forward that keeps a residual, named h-S
//             [residual=H] [keep]           a Backward that reads residual H
//   accepted S [as request]  running S [as request]    with the members' answers up to that point
//   upload S   download S    stalled S [RANK...]   downloaded S   end S
//   shard S RANK REASON                            a shard stream failed
//   cancel ID [principal=P]
//   hold plans   planned S   plan_failed S late|busy   without `hold plans`, plans are immediate
//   share R NAME...   unshare R NAME...            the workers attach or release region R
//   delete H [principal=P]   renew H TTL [principal=P]
// K/V caches; C is a cache, W a writer. Workers answer by command only.
//   cache C [principal=P] [client=C] [id=REQUEST] [header=N] [heads=N] [blocks=N] [ttl=D] [world=N]
//           [members=A,B,...] [max_caches=N] [max_bytes=N]       a block of one head is 2,048 bytes
//   open C W [principal=P] [direct=1 [required=1]] [answered=STEP]
//   hold_cache C TTL [principal=P]   delete_cache C [principal=P]   ranks_differ C EPOCH
//   NAME kv_reserved C [bytes=N] | kv_refused C REASON | kv_malformed C REASON | kv_unsupported C
//   REASON NAME kv_opened C EPOCH COMMITTED COMPLETE | kv_missing C EPOCH NAME kv_settled C EPOCH |
//   kv_unsettled C EPOCH REASON NAME kv_touched C EPOCH STEP | kv_failed C REASON caches
//   [principal=P] [client=C]                              query
// Operators and time
//   drain   undrain   reform   wait DURATION   pause DURATION
// Queries; the trace shows the answer
//   state ID [principal=P]   predicted ID   reason ID   stats   memory   residuals   losses
//   requests MAX   workers   steps (CoordinatorStats::order_steps)
#ifndef RINGATTN_SERVER_CORE_TESTING_SCENARIO_H_
#define RINGATTN_SERVER_CORE_TESTING_SCENARIO_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/core/coordinator.h"

namespace ringattn::server {

// A part of a file. The first has an empty name and holds the file's head comment.
struct ScenarioSection {
  std::string name;
  std::string text;  // with the comments above it; ends with one newline unless empty
};

// Splits a file into its head comment and its scenarios.
std::vector<ScenarioSection> SplitScenarios(const std::string& file);
// Returns the file of these sections, with a blank line between them.
std::string JoinScenarios(const std::vector<ScenarioSection>& sections);

// Executes the commands and returns the section with the traces that occurred. The test passes if
// that equals section.text. Returns INVALID_ARGUMENT for a command outside a scenario, an unknown
// command and an unknown configuration key.
absl::StatusOr<std::string> RunScenario(const ScenarioSection& section);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_TESTING_SCENARIO_H_
