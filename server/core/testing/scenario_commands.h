// The coordinator's commands to workers in scenarios (scenario.h): their text, and automatic
// answers.
#ifndef RINGATTN_SERVER_CORE_TESTING_SCENARIO_COMMANDS_H_
#define RINGATTN_SERVER_CORE_TESTING_SCENARIO_COMMANDS_H_

#include <optional>
#include <string>

#include "ringattn/v1/worker_control.pb.h"

namespace ringattn::server {

struct ScenarioCommand {
  std::string text;  // in the trace
  // The answer of a worker that is not `manual`; such commands are then omitted from the trace.
  std::optional<v1::JoinRequest> answer;
};

// Returns nullopt for messages that neither appear in traces nor have answers.
std::optional<ScenarioCommand> CommandOf(const v1::JoinResponse& message);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_TESTING_SCENARIO_COMMANDS_H_
