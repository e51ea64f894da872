// The arguments of a scenario's command (scenario.h), and the messages of workers that they
// describe.
#ifndef RINGATTN_SERVER_CORE_TESTING_SCENARIO_ARGS_H_
#define RINGATTN_SERVER_CORE_TESTING_SCENARIO_ARGS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ringattn/v1/worker_control.pb.h"

namespace ringattn::server {

// The words of one command; args[0] is its verb, or a worker's name.
using Args = std::vector<std::string>;

// Returns the words from `begin` on, joined by spaces; empty if there are none.
std::string Rest(const Args& args, size_t begin);
// Returns VALUE of the word "key=VALUE", or `otherwise` if there is none.
std::string Option(const Args& args, const std::string& key, const std::string& otherwise);
// Returns the number in "key=NUMBER", or 0.
double Number(const Args& args, const std::string& key);
// Ends the process if the text is not a duration.
absl::Duration Duration(const std::string& text);

// Returns the registration of "join NAME ...", without the incarnation.
v1::Register RegistrationOf(const Args& args);
// Returns the message of "NAME VERB ...", where the worker runs `operation_id`; nullopt for an
// unknown verb.
std::optional<v1::JoinRequest> MessageOf(const std::string& name, const Args& args,
                                         const std::string& operation_id);
// Sets the position that "NAME at OP STEP PROGRESS [waits]" describes.
void SetPosition(const Args& args, v1::Heartbeat* heartbeat);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_TESTING_SCENARIO_ARGS_H_
