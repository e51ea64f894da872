// Executes the commands of a scenario (scenario.h): clients, workers, time and the coordinator.
#ifndef RINGATTN_SERVER_CORE_TESTING_SCENARIO_DRIVER_H_
#define RINGATTN_SERVER_CORE_TESTING_SCENARIO_DRIVER_H_

#include <memory>
#include <string>

#include "server/core/coordinator.h"
#include "server/core/testing/scenario_views.h"

namespace ringattn::server {

// Not thread safe.
class ScenarioDriver {
 public:
  explicit ScenarioDriver(const CoordinatorConfig& config);
  ~ScenarioDriver();

  // Executes one command and returns its trace. An unknown command is a line that begins with
  // "unknown ".
  ScenarioLines Run(const std::string& command);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_TESTING_SCENARIO_DRIVER_H_
