// Scenario tests as text: commands, and below each, after "> ", what the
// coordinator did. RunScenario executes the commands and returns the text with the
// answers that really came, so that a test is EXPECT_SCENARIO(text).
//
//   ring a b                 # join and form; not shown
//   request s1 tokens=100 world=2
//   > a b: reserve 1-1 [0 1]
//   a reserved 1-1
//   b reserved 1-1
//   > s1: accepted 1-1 on a b
//
// Workers heartbeat on their own and answer Prepare, Commit, Teardown and Release
// on their own, unseen, until the script says `manual NAME`. They answer Reserve,
// Run and Cancel only by command. Time moves by `wait` alone, in ticks.
//
//   join NAME [version=V] [tile_q=N] [memory=BYTES] [flops=F] [flops_bf16=F] [call=S]     gone NAME
//   ring NAME...                             manual NAME...     silent NAME...
//   NAME prepared G | committed G [link=BYTES/S] [exchange=S] | torndown G | failed G REASON
//   NAME leaving              # clients reach all but those whose name begins with "hidden"
//   NAME reserved OP [residual=BYTES] | missing OP
//   NAME refused OP [workspace=BYTES] REASON | uploaded OP | released OP
//   NAME baffled OP REASON                   # Reserved.malformed
//   NAME finished OP | cancelled OP | broke OP REASON
//   NAME moved OP RECEIVED SENT [waits] | delivered OP | region_gone OP | stuck OP REASON
//   NAME got_wrong OP REASON
//   NAME at OP STEP PROGRESS [waits]         # later heartbeats say so
//   request S [id=ID] [principal=P] [client=C] [header=N] [tokens=N] [dtype=bf16] [world=N]
//             [deadline=D] [weight=X] [in_flight=N] [queued_bytes=N]    # the client's terms
//             [option=segment_ids] [segment_length=N] [residual_bytes=N]   # of one dilated level
//             [members=A,B,... with world=N] [tile_q=N]
//             [region=R [required=1]]     # all tensors lie in it
//             [direct=1 [required=1]]     # its client can stream to the workers
//             [retain=TTL]          # a Forward that is to be kept, as h-S
//             [residual=H] [keep]   # a Backward that reads it
//   share R NAME...    unshare R NAME...     # these workers have the region, or not any more
//   hold plans    planned S    unplanned S late|busy     # otherwise plans come at once
//   accepted S [as request]   running S [as request]   # its members answer unseen up to there
//   upload S    download S    stands S [MEMBER...]    downloaded S    end S
//   shard S MEMBER REASON    cancel ID [principal=P]    state ID [principal=P]
//   delete H [principal=P]   renew H TTL [principal=P]   residuals
//   drain   undrain   reform   wait DURATION   pause DURATION   stats   memory
//   losses   requests MAX   # what an operator sees of them
//   predicted ID   # seconds that the plan says
#ifndef RINGATTN_SERVER_CORE_TESTING_SCENARIO_H_
#define RINGATTN_SERVER_CORE_TESTING_SCENARIO_H_

#include <string>

#include "server/core/coordinator.h"

namespace ringattn::server {

// Short timeouts for tests: heartbeats each second, silence 5 s.
CoordinatorConfig ScenarioConfig();

std::string RunScenario(const std::string& script,
                        const CoordinatorConfig& config = ScenarioConfig());

// A macro, so that a failure is at the test's line and shows both texts. Needs gtest.
#define EXPECT_SCENARIO(script) EXPECT_EQ(RunScenario(script), script)

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_TESTING_SCENARIO_H_
