#include "common/process/log_level_flag.h"

#include <string>

#include "CLI/App.hpp"

namespace ringattn {

void AddLogLevel(CLI::App* app, LogLevel* level) {
  app->add_option_function<std::string>(
         "--log_level", [level](const std::string& name) { *level = *LogLevelFromName(name); },
         "debug, info, warning or error [info]")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}))
      ->type_name("LEVEL");
}

}  // namespace ringattn
