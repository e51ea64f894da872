// The oracle's verdict as JSON (docs/cli-json.md).
#ifndef RINGATTN_CLIENT_CLI_VERIFY_JSON_H_
#define RINGATTN_CLIENT_CLI_VERIFY_JSON_H_

#include "client/cli/command.h"
#include "common/oracle/comparator.h"

namespace ringattn::client::cli {

// {"passed": ..., "tensors": {"out": {...}, ...}, "unjudged": {"dk": "why", ...}}
Json ReportJson(const oracle::Report& report);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_VERIFY_JSON_H_
