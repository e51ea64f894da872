// The --log_level flag.
#ifndef RINGATTN_COMMON_PROCESS_LOG_LEVEL_FLAG_H_
#define RINGATTN_COMMON_PROCESS_LOG_LEVEL_FLAG_H_

#include "common/observability/log.h"

namespace CLI {
class App;
}

namespace ringattn {

// Parsing throws CLI::ValidationError for an unknown name. `level` must outlive the parsing.
void AddLogLevel(CLI::App* app, LogLevel* level);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_LOG_LEVEL_FLAG_H_
