// What a scenario shows of a coordinator that is asked (scenario.h).
#ifndef RINGATTN_SERVER_CORE_TESTING_SCENARIO_VIEWS_H_
#define RINGATTN_SERVER_CORE_TESTING_SCENARIO_VIEWS_H_

#include <string>
#include <utility>
#include <vector>

#include "ringattn/v1/cluster.pb.h"
#include "server/core/coordinator.h"
#include "server/core/testing/scenario_words.h"

namespace ringattn::server {

using ScenarioLines = std::vector<std::pair<std::string, std::string>>;  // who, text

// What the coordinator has told by itself until now.
struct ScenarioEvents {
  const v1::Topology& published;  // the newest
  size_t losses = 0;
};

// state, predicted, stats, losses, requests, memory, residuals.
bool IsQuestion(const std::string& verb);
// REQUIRES: words[0] is a question.
ScenarioLines AnswerOf(const Coordinator& core, const Words& words, const ScenarioEvents& news);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_TESTING_SCENARIO_VIEWS_H_
