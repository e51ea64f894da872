#include "client/kv/kv_writer.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/api/error.h"
#include "common/base/limits.h"
#include "common/base/monotonic_time.h"
#include "common/kv/kv_error.h"
#include "common/kv/shard_cut.h"
#include "common/wire/durations.h"

namespace ringattn::client {
namespace {

// Errors of common/kv as the library's.
absl::Status FromKvError(const absl::Status& status) {
  const std::string reason = KvErrorReason(status);
  if (reason.empty()) return status;
  return MakeErrorWithReason(status.code(), status.message(), reason);
}

absl::Status StepOrderError(absl::string_view message) {
  return MakeErrorWithReason(absl::StatusCode::kFailedPrecondition, message, "STEP_ORDER");
}

// Tensors of longer calls are not kept for the next one.
constexpr int64_t kMaxKeptBytes = kMiB;

absl::string_view ViewOf(ConstBytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

absl::Status CheckResultMemory(const char* name, size_t given, int64_t needed) {
  if (static_cast<int64_t>(given) == needed) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("results.", name, " has ", given, " bytes; the call returns ", needed));
}

std::string RefusalText(const v1::RowRefusal& row) {
  std::string text =
      absl::StrCat(row.command() ? "command " : "row ", row.row(), ": ", row.reason());
  if (!row.detail().empty()) absl::StrAppend(&text, " (", row.detail(), ")");
  if (row.reason() == "LENGTH_MISMATCH") {
    absl::StrAppend(&text, "; the sequence has ", row.length(), " entries");
  }
  if (row.blocks_missing() > 0) {
    absl::StrAppend(&text, "; ", row.blocks_missing(), " blocks are missing");
  }
  return text;
}

}  // namespace

bool IsKvFenced(const absl::Status& status) { return DetailsOf(status).reason == "KV_FENCED"; }

bool IsKvGone(const absl::Status& status) {
  const std::string reason = DetailsOf(status).reason;
  return reason == "KV_LOST" || reason == "KV_RANKS_DIFFER" || reason == "KV_INCONSISTENT" ||
         reason == "KV_EXPIRED" || reason == "KV_DELETED" || reason == "KV_NOT_FOUND";
}

KvWriter::KvWriter(std::shared_ptr<const KvServiceCalls> service,
                   std::shared_ptr<WorkerChannels> workers, SharedRegion::AttachCall attach,
                   std::string cache_id, KvCacheSpec spec, const v1::KvPlacement& placement,
                   KvOpenOptions options)
    : service_(std::move(service)),
      workers_(std::move(workers)),
      attach_(std::move(attach)),
      cache_id_(std::move(cache_id)),
      spec_(std::move(spec)),
      options_(std::move(options)),
      placement_proto_(placement) {
  placement_.head_parts = static_cast<int>(placement.head_parts());
  placement_.position_parts = static_cast<int>(placement.position_parts());
  for (const KvLayerGroup& group : spec_.groups) num_layers_ += group.layers.size();
}

// -------------------------------------------------------------------------------------- steps

bool KvWriter::is_complete() const {
  if (!step_->accepted) return false;
  return step_->step.append_tokens() == 0 || step_->answered.size() == num_layers_;
}

absl::Status KvWriter::BeginStep(const v1::StepBegin& begin) {
  if (!ended_.ok()) return ended_;
  if (step_.has_value() && step_->accepted && !is_complete()) {
    return StepOrderError(absl::StrCat("step ", step_->step.number,
                                       " is not complete: ", step_->answered.size(), " of ",
                                       num_layers_, " layers were called"));
  }
  const bool replaces = step_.has_value() && !step_->accepted;
  CurrentStep next;
  v1::StepBegin* const own = next.begin.mutable_begin();
  *own = begin;
  own->set_step(replaces || !step_.has_value() ? committed_ + 1 : step_->step.number + 1);
  absl::StatusOr<KvStep> step = ParseStep(*own, ringattn::Limits());
  if (!step.ok()) return FromKvError(step.status());
  next.step = *std::move(step);
  if (replaces && step_->sent) {
    if (next.step == step_->step) return absl::OkStatus();
    return MakeErrorWithReason(
        absl::StatusCode::kFailedPrecondition,
        absl::StrCat("step ", next.step.number,
                     " was sent with other rows and its outcome is unknown; repeat it or open the "
                     "cache again"),
        "STEP_CONFLICT");
  }
  if (step_.has_value() && !replaces) committed_ = step_->step.number;
  step_ = std::move(next);
  begun_on_streams_ = false;
  return absl::OkStatus();
}

absl::StatusOr<KvLayerReport> KvWriter::CallLayer(const KvLayerArgs& args,
                                                  const KvLayerResults& results,
                                                  const KvCallOptions& options) {
  if (!ended_.ok()) return ended_;
  if (!step_.has_value()) return StepOrderError("no step is described; call BeginStep first");
  const auto location = FindLayer(spec_, args.layer);
  if (!location.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer is ", args.layer, "; no group of the cache has this layer"));
  }
  const bool cuts = uses_workers() && streams_->size() > 1;
  requests_.resize(streams_->size());
  v1::LayerCall header;  // of the call that is cut
  v1::LayerCall& call = cuts ? header : *requests_.front().mutable_call();
  call.set_step(step_->step.number);
  call.set_layer(args.layer);
  call.set_output(args.output == v1::KV_OUTPUT_UNSPECIFIED ? v1::KV_OUTPUT_OUT : args.output);
  const KvCallBytes bytes = CallBytes(spec_, step_->step, location->group, call.output());
  if (absl::Status status = CheckResultMemory("out", results.out.size(), bytes.out); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckResultMemory("lse", results.lse.size(), bytes.lse); !status.ok()) {
    return status;
  }
  const KvCallTensors tensors{ViewOf(args.q), ViewOf(args.k), ViewOf(args.v)};
  if (absl::Status status = CheckCallBytes(tensors, bytes); !status.ok()) {
    return FromKvError(status);
  }
  if (!cuts) {
    call.mutable_q()->assign(tensors.q.data(), tensors.q.size());
    call.mutable_k()->assign(tensors.k.data(), tensors.k.size());
    call.mutable_v()->assign(tensors.v.data(), tensors.v.size());
  }
  // The tensors for each peer: those of its rank, or all of them.
  int64_t sent = 0;
  const int64_t most =
      uses_workers() ? ringattn::Limits().max_step_bytes : ringattn::Limits().max_message_bytes;
  int64_t result_bytes = bytes.out + bytes.lse;
  for (size_t i = 0; i < requests_.size(); ++i) {
    v1::LayerCall* own = requests_[i].mutable_call();
    if (cuts) {
      CutCall(spec_, placement_, step_->step, call, tensors, static_cast<int>(i), own);
      const KvCallBytes result = CallBytesOfRank(spec_, placement_, step_->step, location->group,
                                                 own->output(), static_cast<int>(i));
      result_bytes = i == 0 ? result.out + result.lse
                            : std::max<int64_t>(result_bytes, result.out + result.lse);
    }
    const auto own_bytes =
        static_cast<int64_t>(own->q().size() + own->k().size() + own->v().size());
    if (own_bytes > most) {
      return absl::ResourceExhaustedError(absl::StrCat("the call sends ", own_bytes,
                                                       " bytes on one stream; the maximum is ",
                                                       most, ": use fewer tokens per step"));
    }
    sent += own_bytes;
  }
  auto answers = Send(requests_, result_bytes, /*with_step=*/true, options);
  if (sent > kMaxKeptBytes) requests_.clear();
  if (!answers.ok()) return answers.status();
  std::vector<v1::LayerResult> parts;
  int64_t received = 0;
  for (v1::StepResponse& answer : *answers) {
    if (!answer.has_result() || answer.result().step() != step_->step.number ||
        answer.result().layer() != args.layer) {
      return MakeErrorWithReason(absl::StatusCode::kInternal,
                                 "a layer call was answered with another message", "BAD_ANSWER");
    }
    received += static_cast<int64_t>(answer.result().out().size() + answer.result().lse().size());
    parts.push_back(std::move(*answer.mutable_result()));
  }
  absl::StatusOr<v1::LayerResult> joined =
      cuts ? JoinResults(spec_, placement_, step_->step, call, parts) : std::move(parts.front());
  if (!joined.ok()) return joined.status();
  if (static_cast<int64_t>(joined->out().size()) != bytes.out ||
      static_cast<int64_t>(joined->lse().size()) != bytes.lse) {
    return MakeErrorWithReason(absl::StatusCode::kInternal,
                               "a layer call was answered with a result of another size",
                               "BAD_ANSWER");
  }
  std::memcpy(results.out.data(), joined->out().data(), joined->out().size());
  std::memcpy(results.lse.data(), joined->lse().data(), joined->lse().size());
  step_->answered.insert(args.layer);
  return KvLayerReport{ToDuration(joined->device_time()), sent, received};
}

absl::Status KvWriter::CommitStep(const KvCallOptions& options) {
  if (!ended_.ok()) return ended_;
  if (!step_.has_value()) return absl::OkStatus();
  if (step_->accepted && !is_complete()) {
    return StepOrderError(absl::StrCat("step ", step_->step.number,
                                       " is not complete: ", step_->answered.size(), " of ",
                                       num_layers_, " layers were called"));
  }
  if (!step_->accepted && step_->step.append_tokens() > 0) {
    return StepOrderError(
        absl::StrCat("step ", step_->step.number, " appends; call every layer before CommitStep"));
  }
  if (!step_->accepted) {
    if (auto begun = Send({}, 0, /*with_step=*/true, options); !begun.ok()) return begun.status();
  }
  const uint64_t number = step_->step.number;
  v1::StepRequest commit;
  commit.mutable_commit()->set_step(number);
  auto answers = Send(std::vector<v1::StepRequest>(streams_->size(), commit), 0,
                      /*with_step=*/false, options);
  if (!answers.ok()) return answers.status();
  committed_ = number;
  step_.reset();
  return absl::OkStatus();
}

absl::Status KvWriter::RoundTrip(const KvCallOptions& options) {
  if (!ended_.ok()) return ended_;
  if (step_.has_value()) {
    return StepOrderError(absl::StrCat("step ", step_->step.number, " is in progress"));
  }
  v1::StepRequest commit;
  commit.mutable_commit()->set_step(committed_);
  return Send(std::vector<v1::StepRequest>(streams_->size(), commit), 0, /*with_step=*/false,
              options)
      .status();
}

void KvWriter::CloseStreams() {
  if (streams_ != nullptr) streams_->Close();
  streams_ = nullptr;
  rings_ = nullptr;
  if (ended_.ok()) ended_ = absl::FailedPreconditionError("the cache is closed");
}

// -------------------------------------------------------------------------- sending, recovery

absl::StatusOr<std::vector<v1::StepResponse>> KvWriter::Send(
    const std::vector<v1::StepRequest>& requests, int64_t result_bytes, bool with_step,
    const KvCallOptions& options) {
  StepStreams::Limits limits;
  limits.deadline = MonotonicNow() + options.deadline;
  limits.interrupted = &options.interrupted;
  absl::Time give_up = absl::InfiniteFuture();
  absl::Duration backoff = kMinBackoff;
  while (true) {
    if (with_step && !step_.has_value()) {  // Recover has found it complete
      return StepOrderError(absl::StrCat("step ", committed_,
                                         " was complete when the coordinator was lost, and is "
                                         "committed; begin the next step"));
    }
    auto answers = SendOnce(requests, result_bytes, with_step, limits);
    if (answers.ok()) return answers;
    absl::Status status = answers.status();
    if (streams_->is_open() || IsVerdict(status) || absl::IsCancelled(status)) {
      return Noted(std::move(status));
    }
    // A stream is broken.
    if (give_up == absl::InfiniteFuture()) give_up = MonotonicNow() + options_.recovery_time;
    if (absl::Status recovered = Recover(status, limits); !recovered.ok()) {
      return Noted(std::move(recovered));
    }
    if (MonotonicNow() + backoff >= std::min(give_up, limits.deadline)) return Noted(status);
    if (options.interrupted && options.interrupted()) {
      return absl::CancelledError("the call was interrupted");
    }
    absl::SleepFor(backoff);
    backoff = std::min(2 * backoff, kMaxBackoff);
  }
}

absl::StatusOr<std::vector<v1::StepResponse>> KvWriter::SendOnce(
    const std::vector<v1::StepRequest>& requests, int64_t result_bytes, bool with_step,
    const StepStreams::Limits& limits) {
  if (!streams_->is_open()) {
    if (absl::Status status = OpenStreams(limits); !status.ok()) return status;
  }
  const bool begins = with_step && !begun_on_streams_;
  StepStreams::Requests messages(streams_->size());
  for (size_t i = 0; i < messages.size(); ++i) {
    if (begins) messages[i].push_back(&step_->begin);
    if (!requests.empty()) messages[i].push_back(&requests[i]);
  }
  if (messages.front().empty()) return std::vector<v1::StepResponse>();
  if (begins) step_->sent = true;
  auto answers = streams_->Exchange(messages, result_bytes, limits);
  if (!answers.ok()) return answers.status();
  if (begins) {
    if (absl::Status status = TakeBegun(*answers); !status.ok()) return status;
  }
  std::vector<v1::StepResponse> last;
  for (std::vector<v1::StepResponse>& of_peer : *answers) {
    if (!requests.empty()) last.push_back(std::move(of_peer.back()));
  }
  return last;
}

absl::Status KvWriter::TakeBegun(const Answers& answers) {
  const v1::StepResponse& first = answers.front().front();
  uint64_t blocks_free = first.accepted().blocks_free();
  for (const std::vector<v1::StepResponse>& of_peer : answers) {
    const v1::StepResponse& answer = of_peer.front();
    if (answer.message_case() != first.message_case()) {
      return RanksDiffer("some accepted a step that others refused");
    }
    if (answer.has_refused()) continue;
    if (!answer.has_accepted()) {
      return MakeErrorWithReason(absl::StatusCode::kInternal,
                                 "StepBegin was answered with another message", "BAD_ANSWER");
    }
    if (answer.accepted().tables_crc32c() != first.accepted().tables_crc32c()) {
      return RanksDiffer("their block tables differ");
    }
    blocks_free = std::min<uint64_t>(blocks_free, answer.accepted().blocks_free());
    leaving_ |= answer.accepted().leaving();
  }
  if (first.has_refused()) return Refused(first.refused());
  begun_on_streams_ = true;
  blocks_free_ = blocks_free;
  if (!step_->accepted) ApplyStep();
  step_->accepted = true;
  return absl::OkStatus();
}

absl::Status KvWriter::Refused(const v1::StepRefused& refused) {
  refusal_ = refused;
  const uint64_t number = step_->step.number;
  step_.reset();
  std::string text = absl::StrCat("the service refused step ", number);
  for (const v1::RowRefusal& row : refused.rows()) absl::StrAppend(&text, "; ", RefusalText(row));
  return MakeErrorWithReason(absl::StatusCode::kFailedPrecondition, text, kStepRefused);
}

void KvWriter::ApplyStep() {
  if (spec_.numbering == KvNumbering::kBlocks) return;
  for (const KvCommand& command : step_->step.commands) {
    if (const auto* fork = std::get_if<KvForkCommand>(&command)) {
      sequences_[fork->target] = static_cast<uint64_t>(fork->length);
    } else {
      for (const SequenceId id : std::get<KvDropCommand>(command).sequences) sequences_.erase(id);
    }
  }
  for (const StepRow& row : step_->step.rows) {
    sequences_[row.sequence] = static_cast<uint64_t>(row.end());
  }
}

absl::Status KvWriter::RanksDiffer(const std::string& what) {
  streams_->Close();
  static_cast<void>(service_->Delete(cache_id_, kStateDeadline));
  return MakeErrorWithReason(absl::StatusCode::kDataLoss,
                             absl::StrCat("the workers of the cache disagree: ", what,
                                          "; create another cache and prefill it"),
                             "KV_RANKS_DIFFER");
}

absl::Status KvWriter::Noted(absl::Status status) {
  if (IsKvFenced(status) || IsKvGone(status)) ended_ = status;
  return status;
}

}  // namespace ringattn::client
