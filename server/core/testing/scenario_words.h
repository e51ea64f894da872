// The words of a scenario's line (scenario.h), and what they say for a worker.
#ifndef RINGATTN_SERVER_CORE_TESTING_SCENARIO_WORDS_H_
#define RINGATTN_SERVER_CORE_TESTING_SCENARIO_WORDS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ringattn/v1/worker_control.pb.h"

namespace ringattn::server {

using Words = std::vector<std::string>;

// From `begin` on, none if there are no more.
std::string Rest(const Words& words, size_t begin);
// "key=value" among the words, or the default.
std::string Option(const Words& words, const std::string& key, const std::string& otherwise);
double Number(const Words& words, const std::string& key);
// Ends the program at what is none.
absl::Duration Duration(const std::string& text);

// join NAME ...; without the incarnation.
v1::Register RegistrationOf(const Words& words);
// NAME VERB ...: what worker `name` says, which is at `operation_id`. Nothing for an unknown verb.
std::optional<v1::JoinRequest> MessageOf(const std::string& name, const Words& words,
                                         const std::string& operation_id);
// NAME at OP STEP PROGRESS [waits]: where its heartbeats say that it is.
void SetPosition(const Words& words, v1::Heartbeat* heartbeat);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_TESTING_SCENARIO_WORDS_H_
