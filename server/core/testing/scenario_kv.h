// The commands, messages and traces of K/V caches in scenarios (scenario.h).
#ifndef RINGATTN_SERVER_CORE_TESTING_SCENARIO_KV_H_
#define RINGATTN_SERVER_CORE_TESTING_SCENARIO_KV_H_

#include <map>
#include <optional>
#include <string>

#include "ringattn/v1/worker_control.pb.h"
#include "server/core/coordinator.h"
#include "server/core/testing/scenario_args.h"
#include "server/core/testing/scenario_views.h"

namespace ringattn::server {

// Sets the fields of "join NAME ... kv=BYTES holds=C:RANK:EPOCH:COMMITTED:WORKER,WORKER...".
void AddKvCaches(const Args& args, v1::Register* registration);
// Fills in a message about a cache; returns false for another verb.
bool FillKvMessage(const Args& args, v1::JoinRequest* message);
// The text of a command to a worker about a cache; empty for another message.
std::string KvCommandText(const v1::JoinResponse& message);

// The clients of caches. Names of caches are their ids.
class ScenarioKvClients {
 public:
  // The event of a command; nullopt for another verb.
  std::optional<Event> EventOf(const Args& args);
  ScenarioLines LinesOf(const KvCacheAnswered& answer) const;
  ScenarioLines LinesOf(const KvWriterAnswered& answer);
  ScenarioLines LinesOf(const KvWriterEnded& ended) const;
  // Answers "caches [principal=P]".
  static ScenarioLines Show(const Coordinator& core, const Args& args);

 private:
  uint64_t Call(const std::string& name);

  std::map<uint64_t, std::string> calls_;      // names
  std::map<std::string, std::string> tokens_;  // of all writers, by token: the cache and its epoch
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_TESTING_SCENARIO_KV_H_
