#include "server/core/testing/scenario_words.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "common/wire/durations.h"
#include "common/wire/kernel_rate_values.h"

namespace ringattn::server {
namespace {

template <typename Message>
void Name(Message* message, const std::string& operation_id) {
  message->set_operation_id(operation_id);
  message->set_generation(std::atoll(operation_id.c_str()));  // "generation-number"
}

void AddRates(const std::string& option, const Words& words, const std::vector<DType>& dtypes,
              v1::Register* registration) {
  const double flops = Number(words, option);
  if (flops <= 0) return;
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    *registration->add_kernel_rates() = ToProto(
        KernelRate{option, dtypes, direction, flops, {.score_terms = option == "flops_terms"}});
  }
}

// Of rings and generations; false: of something else.
bool SaysOfRing(const std::string& name, const Words& words, const std::string& operation_id,
                v1::JoinRequest* message) {
  const std::string& verb = words[1];
  const uint64_t generation = words.size() > 2 ? std::atoll(words[2].c_str()) : 0;
  if (verb == "prepared") {
    message->mutable_prepared()->set_generation(generation);
    message->mutable_prepared()->set_blob(name);
  } else if (verb == "committed") {
    v1::Committed* committed = message->mutable_committed();
    committed->set_generation(generation);
    committed->set_link_bytes_per_second(Number(words, "link"));
    SetSeconds(Number(words, "exchange"), committed->mutable_exchange_overhead());
  } else if (verb == "leaving") {
    message->mutable_leaving();
  } else if (verb == "torndown") {
    message->mutable_torn_down()->set_generation(generation);
  } else if (verb == "failed") {
    v1::GenerationFailed* failed = message->mutable_generation_failed();
    failed->set_generation(generation);
    failed->set_operation_id(operation_id);
    failed->set_reason(Rest(words, 3));
  } else {
    return false;
  }
  return true;
}

bool SaysOfTransfer(const Words& words, v1::JoinRequest* message) {
  const std::string& verb = words[1];
  if (verb != "moved" && verb != "region_gone" && verb != "stuck" && verb != "got_wrong") {
    return false;
  }
  v1::TransferProgress* progress = message->mutable_transfer_progress();
  Name(progress, words[2]);
  if (verb == "moved") {
    progress->set_received(std::atoll(words[3].c_str()));
    progress->set_sent(std::atoll(words[4].c_str()));
    progress->set_waits_for_client(words.back() == "waits");
  }
  progress->set_region_released(verb == "region_gone");
  if (verb == "stuck") progress->set_failure(Rest(words, 3));
  if (verb == "got_wrong") progress->set_bad_chunk(Rest(words, 3));
  return true;
}

bool SaysOfOperation(const Words& words, v1::JoinRequest* message) {
  const std::string& verb = words[1];
  if (verb == "reserved" || verb == "refused" || verb == "missing" || verb == "baffled") {
    v1::Reserved* reserved = message->mutable_reserved();
    Name(reserved, words[2]);
    reserved->set_ok(verb == "reserved");
    reserved->set_residual_missing(verb == "missing");
    reserved->set_malformed(verb == "baffled");
    reserved->set_residual_bytes(static_cast<uint64_t>(Number(words, "residual")));
    reserved->set_reason(Rest(words, 3));
    reserved->set_workspace_bytes(static_cast<uint64_t>(Number(words, "workspace")));
  } else if (verb == "uploaded") {
    Name(message->mutable_uploaded(), words[2]);
  } else if (verb == "released") {
    Name(message->mutable_released(), words[2]);
  } else if (verb == "finished" || verb == "cancelled" || verb == "broke") {
    v1::Finished* finished = message->mutable_finished();
    Name(finished, words[2]);
    finished->set_ok(verb == "finished");
    finished->set_cancelled(verb == "cancelled");
    finished->set_reason(Rest(words, 3));
  } else if (verb == "delivered") {
    Name(message->mutable_delivered(), words[2]);
  } else {
    return SaysOfTransfer(words, message);
  }
  return true;
}

}  // namespace

std::string Rest(const Words& words, size_t begin) {
  return absl::StrJoin(words.begin() + std::min(begin, words.size()), words.end(), " ");
}

std::string Option(const Words& words, const std::string& key, const std::string& otherwise) {
  for (const std::string& word : words) {
    absl::string_view value = word;
    if (absl::ConsumePrefix(&value, absl::StrCat(key, "="))) return std::string(value);
  }
  return otherwise;
}

double Number(const Words& words, const std::string& key) {
  return std::atof(Option(words, key, "0").c_str());
}

absl::Duration Duration(const std::string& text) {
  absl::Duration duration;
  if (!absl::ParseDuration(text, &duration)) std::abort();
  return duration;
}

v1::Register RegistrationOf(const Words& words) {
  v1::Register registration;
  registration.set_name(words[1]);
  registration.set_version(Option(words, "version", "1"));
  registration.set_memory_bytes(std::atoll(Option(words, "memory", "0").c_str()));
  AddRates("flops_terms", words, {DType::kFloat32}, &registration);
  AddRates("flops_bf16", words, {DType::kBFloat16}, &registration);  // the first that fits counts
  AddRates("flops", words, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, &registration);
  registration.set_device(Option(words, "device", ""));
  const std::string served = Option(words, "options", "");
  if (!served.empty()) registration.add_options(served);
  if (const int tile = std::atoi(Option(words, "tile_q", "0").c_str()); tile > 0) {
    registration.mutable_tuning()->add_tile_q(tile);
  }
  SetSeconds(Number(words, "call"), registration.mutable_call_overhead());
  registration.set_local_socket(absl::StrCat("/", words[1]));
  registration.set_data_address(absl::StrCat(words[1], ":1"));
  if (!absl::StartsWith(words[1], "hidden")) {
    registration.set_client_data_address(absl::StrCat(words[1], ":2"));
  }
  return registration;
}

std::optional<v1::JoinRequest> MessageOf(const std::string& name, const Words& words,
                                         const std::string& operation_id) {
  v1::JoinRequest message;
  const bool is_known =
      SaysOfRing(name, words, operation_id, &message) || SaysOfOperation(words, &message);
  return is_known ? std::optional(std::move(message)) : std::nullopt;
}

void SetPosition(const Words& words, v1::Heartbeat* heartbeat) {
  Name(heartbeat, words[2]);
  heartbeat->set_step(std::atoi(words[3].c_str()));
  heartbeat->set_progress(std::atoll(words[4].c_str()));
  heartbeat->set_waits_for_peer(words.back() == "waits");
}

}  // namespace ringattn::server
