#include "server/edge/kv/kv_relay.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/base/monotonic_time.h"
#include "common/kv/kv_error.h"
#include "common/kv/shard_cut.h"
#include "common/kv/step.h"
#include "server/core/kv/kv_failures.h"
#include "server/edge/call/call_failures.h"
#include "server/edge/header/error_details.h"
#include "server/edge/kv/kv_relays.h"
#include "server/edge/kv/kv_requests.h"
#include "server/edge/kv/kv_shard_stream.h"

namespace ringattn::server {
namespace {

absl::Status BadCall(const std::string& message) {
  return KvError(absl::StatusCode::kInvalidArgument, "BAD_CALL", message);
}

Failure StreamBroken(const std::string& worker, const std::string& why,
                     absl::Duration retry_after) {
  Failure failure;
  failure.code = absl::StatusCode::kUnavailable;
  failure.reason = "KV_STREAM_BROKEN";
  failure.message =
      absl::StrCat("the stream to worker ", worker, " broke: ", why, "; call OpenCache");
  failure.retry_after = retry_after;
  return failure;
}

Failure BadAnswer(const std::string& worker) {
  Failure failure;
  failure.code = absl::StatusCode::kInternal;
  failure.reason = "BAD_ANSWER";
  failure.message = absl::StrCat("worker ", worker, " answered with an unexpected message");
  return failure;
}

// A status that a worker chose, as opposed to one that reports a broken connection.
bool IsVerdict(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::UNKNOWN:
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::UNAUTHENTICATED:  // fenced; the core reports it
      return false;
    default:
      return true;
  }
}

class KvRelay final : public grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse>,
                      public KvShardStreamOwner,
                      public KvRelayStream,
                      public std::enable_shared_from_this<KvRelay> {
 public:
  KvRelay(const KvContext* context, grpc::CallbackServerContext* call)
      : context_(*context), call_(call), started_at_(MonotonicNow()) {}

  // Keeps itself alive until OnDone.
  void Begin() {
    self_ = shared_from_this();
    std::variant<Caller, grpc::Status> caller = context_.callers->Identify(*call_);
    if (const auto* refused = std::get_if<grpc::Status>(&caller)) return End(*refused);
    caller_ = std::get<Caller>(std::move(caller));
    if (auto full = context_.relays->Enter(shared_from_this(), caller_, context_.retry_after)) {
      return Fail(*full);
    }
    ReadNext();
  }

  // ------------------------------------------------------------- the client's side

  void OnReadDone(bool ok) override {
    if (!ok) return End(grpc::Status::OK);
    const auto bytes = static_cast<int64_t>(request_.ByteSizeLong());
    AddTotals([bytes](Totals* totals) { totals->received_bytes += bytes; });
    if (bytes > context_.limits.max_message_bytes) {
      return Reject(absl::ResourceExhaustedError(absl::StrCat(
          "message has ", bytes, " bytes; the maximum is ", context_.limits.max_message_bytes)));
    }
    const bool is_hello = request_.has_hello();
    if (!opened_ && !is_hello) return Reject(BadCall("the first message must be hello"));
    switch (request_.message_case()) {
      case v1::StepRequest::kHello:
        if (opened_) return Reject(BadCall("hello was sent already"));
        return AskCore();
      case v1::StepRequest::kBegin:
        return SendBegin();
      case v1::StepRequest::kCall:
        return SendCall();
      case v1::StepRequest::kCommit:
        return SendToAll(request_);
      case v1::StepRequest::MESSAGE_NOT_SET:
        return Reject(BadCall("the message has no hello, begin, call or commit"));
    }
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return End(grpc::Status::OK);
    ReadNext();
  }

  void OnCancel() override { End(grpc::Status::CANCELLED); }

  void OnDone() override {
    context_.relays->Leave(this);
    ObserveStep();
    WriteAudit();
    const std::shared_ptr<KvRelay> self = std::exchange(self_, nullptr);
    // Waits until the last holder has released the lock.
    { absl::MutexLock lock(&mutex_); }
  }

  void Fail(const Failure& failure) override { End(ToGrpcStatus(failure, context_.limits)); }

  void OnTick(absl::Time now) override {
    std::optional<Failure> failure;
    {
      absl::MutexLock lock(&mutex_);
      if (finished_at_) {
        // The client does not take a message, so the status cannot be sent.
        if (now - *finished_at_ >= context_.limits.unread_status_timeout) call_->TryCancel();
        return;
      }
      if (broken_at_ && now - *broken_at_ >= kVerdictTime) {
        failure = StreamBroken(broken_worker_, broken_why_, context_.retry_after);
      } else if (!greeted_ && now - started_at_ >= context_.limits.header_timeout) {
        failure = HeaderLate(context_.limits.header_timeout);
      }
    }
    if (failure) Fail(*failure);
  }

  // ----------------------------------------------------------- the workers' side

  void OnShardAnswer(int rank, v1::StepResponse* response) override {
    {
      absl::MutexLock lock(&mutex_);
      if (finished_at_ || awaiting_ == 0) return;
      answers_[static_cast<size_t>(rank)] = std::move(*response);
      if (--awaiting_ > 0) return;
    }
    Join();
  }

  void OnShardEnded(int rank, const grpc::Status& status) override {
    {
      absl::MutexLock lock(&mutex_);
      if (finished_at_) return;
      if (!IsVerdict(status)) {
        if (!broken_at_) {
          broken_at_ = MonotonicNow();
          broken_worker_ = workers_[static_cast<size_t>(rank)];
          broken_why_ = status.error_message();
        }
        return;
      }
    }
    End(status);
  }

 private:
  struct Totals {
    int64_t steps = 0;
    int64_t calls = 0;
    int64_t received_bytes = 0;
    int64_t sent_bytes = 0;
    std::optional<absl::Time> began_at;  // of the step in progress
    absl::Time answered_at = absl::InfinitePast();
  };

  void ReadNext() {
    absl::MutexLock lock(&mutex_);
    if (!finished_at_) StartRead(&request_);
  }

  void Reply(v1::StepResponse response) {
    response_ = std::move(response);
    const auto bytes = static_cast<int64_t>(response_.ByteSizeLong());
    absl::MutexLock lock(&mutex_);
    totals_.sent_bytes += bytes;
    if (!finished_at_) StartWrite(&response_);
  }

  void End(const grpc::Status& status) {
    std::vector<std::shared_ptr<KvShardStream>> shards;
    {
      absl::MutexLock lock(&mutex_);
      if (finished_at_) return;
      finished_at_ = MonotonicNow();
      status_ = status;
      shards.swap(shards_);
      Finish(status);
    }
    for (const auto& shard : shards) shard->Cancel();
  }

  void Reject(const absl::Status& status) { Fail(KvRequestFailure(status)); }

  // The ranks disagree, so no answer of theirs may be used any more.
  void RanksDiffer() {
    context_.core->Post(KvCacheFailed{cache_id_, epoch_, KvCacheEnd::kRanksDiffer});
    Fail(KvEnded(KvCacheEnd::kRanksDiffer, ""));
  }

  // -------------------------------------------------------------------- opening

  void AskCore() {
    cache_id_ = request_.hello().cache_id();
    epoch_ = request_.hello().epoch();
    {
      absl::MutexLock lock(&mutex_);
      greeted_ = true;
    }
    const bool asked = context_.core->Ask(
        [self = shared_from_this()](const Coordinator& core) { self->OpenShards(core); });
    if (!asked) Fail(CoreBusy(context_.retry_after));
  }

  // Runs on the core's thread, as does the end of a writer, so that no end is missed.
  void OpenShards(const Coordinator& core) {
    const KvWriterView view =
        core.FindKvWriter(cache_id_, caller_.principal, epoch_, request_.hello().token());
    if (view.failure) return Fail(*view.failure);
    spec_ = view.spec;
    placement_ = view.placement;
    for (const KvWriterView::Shard& shard : view.shards) workers_.push_back(shard.worker);
    opened_ = true;
    context_.relays->Attach(this, cache_id_, epoch_);
    std::vector<v1::StepRequest> hellos(view.shards.size());
    for (size_t rank = 0; rank < view.shards.size(); ++rank) {
      v1::StepHello* hello = hellos[rank].mutable_hello();
      hello->set_cache_id(cache_id_);
      hello->set_epoch(epoch_);
      hello->set_token(view.shards[rank].token);
      hello->set_rank(static_cast<uint32_t>(rank));
      auto shard = KvShardStream::Open(shared_from_this(), static_cast<int>(rank),
                                       context_.channels->Next(view.shards[rank].data_address),
                                       context_.secret);
      absl::MutexLock lock(&mutex_);
      if (!finished_at_) {
        shards_.push_back(std::move(shard));
      } else {
        shard->Cancel();
        return;
      }
    }
    Send(std::move(hellos));
  }

  // ----------------------------------------------------------------- forwarding

  // One message for each rank.
  void Send(std::vector<v1::StepRequest> requests) {
    std::vector<std::shared_ptr<KvShardStream>> shards;
    {
      absl::MutexLock lock(&mutex_);
      if (finished_at_) return;
      shards = shards_;
      answers_.assign(shards.size(), {});
      awaiting_ = static_cast<int>(shards.size());
    }
    for (size_t rank = 0; rank < shards.size(); ++rank) {
      shards[rank]->Send(std::move(requests[rank]));
    }
  }

  void SendToAll(const v1::StepRequest& request) {
    Send(std::vector<v1::StepRequest>(workers_.size(), request));
  }

  void SendBegin() {
    absl::StatusOr<KvStep> step = ParseStep(request_.begin(), context_.limits);
    if (!step.ok()) return Reject(step.status());
    next_step_ = *std::move(step);
    SendToAll(request_);
  }

  void SendCall() {
    const v1::LayerCall& call = request_.call();
    if (!step_ || call.step() != step_->number) {
      if (refused_step_ && call.step() == *refused_step_) return ReadNext();
      return Reject(KvError(absl::StatusCode::kFailedPrecondition, "STEP_ORDER",
                            absl::StrCat("call.step is ", call.step(), "; ",
                                         step_ ? absl::StrCat("step ", step_->number, " is begun")
                                               : "no step is begun")));
    }
    if (absl::Status status = CheckCall(call); !status.ok()) return Reject(status);
    std::vector<v1::StepRequest> requests(workers_.size());
    for (size_t rank = 0; rank < requests.size(); ++rank) {
      *requests[rank].mutable_call() =
          CutCall(*spec_, placement_, *step_, call, static_cast<int>(rank));
    }
    Send(std::move(requests));
  }

  absl::Status CheckCall(const v1::LayerCall& call) const {
    const std::optional<KvLayerLocation> location = FindLayer(*spec_, call.layer());
    if (!location) {
      return BadCall(absl::StrCat("call.layer is ", call.layer(), "; no group has this layer"));
    }
    if (!v1::KvOutput_IsValid(call.output())) {
      return BadCall(absl::StrCat("call.output is ", static_cast<int>(call.output()),
                                  "; use a value of KvOutput"));
    }
    const KvCallBytes all = CallBytes(*spec_, *step_, location->group, call.output());
    if (absl::Status status = CheckCallBytes(call, all); !status.ok()) return status;
    // With several position parts each rank answers with partial results in fp32.
    const v1::KvOutput output = placement_.position_parts > 1 && call.output() != v1::KV_OUTPUT_NONE
                                    ? v1::KV_OUTPUT_PARTIAL
                                    : call.output();
    const KvCallBytes of_rank =
        CallBytesOfRank(*spec_, placement_, *step_, location->group, output, 0);
    const int64_t result = std::max(all.out + all.lse, of_rank.out + of_rank.lse);
    if (result > context_.limits.max_chunk_bytes_up) {
      return BadCall(absl::StrCat("the result takes ", result, " bytes; the relay returns at most ",
                                  context_.limits.max_chunk_bytes_up,
                                  ": use fewer queries or direct streams"));
    }
    return absl::OkStatus();
  }

  // -------------------------------------------------------------------- joining

  // All ranks have answered. Only this thread uses the stream's fields now.
  void Join() {
    const auto expected = [&]() -> v1::StepResponse::MessageCase {
      switch (request_.message_case()) {
        case v1::StepRequest::kHello:
          return v1::StepResponse::kOpened;
        case v1::StepRequest::kCall:
          return v1::StepResponse::kResult;
        case v1::StepRequest::kCommit:
          return v1::StepResponse::kCommitted;
        default:
          return v1::StepResponse::kAccepted;
      }
    }();
    const bool is_begin = request_.has_begin();
    for (size_t rank = 0; rank < answers_.size(); ++rank) {
      const auto kind = answers_[rank].message_case();
      const bool refused = is_begin && kind == v1::StepResponse::kRefused;
      if (kind != expected && !refused) return Fail(BadAnswer(workers_[rank]));
    }
    switch (expected) {
      case v1::StepResponse::kOpened:
        return Reply(JoinOpened());
      case v1::StepResponse::kResult:
        return JoinCall();
      case v1::StepResponse::kCommitted:
        ObserveStep();
        step_.reset();
        return Reply(std::move(answers_[0]));
      default:
        return JoinBegin();
    }
  }

  // Ranks that undid a step and ranks that never began it may report different lengths. The smaller
  // one is valid on all of them.
  v1::StepResponse JoinOpened() {
    v1::StepResponse joined;
    uint64_t next_step = answers_[0].opened().next_step();
    std::map<uint64_t, std::pair<size_t, uint64_t>> lengths;  // ranks, smallest length
    for (const v1::StepResponse& answer : answers_) {
      next_step = std::min(next_step, static_cast<uint64_t>(answer.opened().next_step()));
      for (const v1::KvSequence& sequence : answer.opened().sequences()) {
        auto [found, added] =
            lengths.emplace(sequence.sequence(), std::pair<size_t, uint64_t>(0, sequence.length()));
        ++found->second.first;
        found->second.second = std::min<uint64_t>(found->second.second, sequence.length());
      }
    }
    joined.mutable_opened()->set_next_step(next_step);
    for (const auto& [number, ranks_and_length] : lengths) {
      if (ranks_and_length.first < answers_.size()) continue;
      v1::KvSequence* sequence = joined.mutable_opened()->add_sequences();
      sequence->set_sequence(number);
      sequence->set_length(ranks_and_length.second);
    }
    return joined;
  }

  void JoinBegin() {
    v1::StepResponse joined = answers_[0];
    for (const v1::StepResponse& answer : answers_) {
      if (answer.message_case() != joined.message_case()) return RanksDiffer();
      if (!answer.has_accepted()) continue;
      if (answer.accepted().tables_crc32c() != joined.accepted().tables_crc32c()) {
        return RanksDiffer();
      }
      joined.mutable_accepted()->set_blocks_free(
          std::min(joined.accepted().blocks_free(), answer.accepted().blocks_free()));
      if (answer.accepted().leaving()) joined.mutable_accepted()->set_leaving(true);
    }
    if (joined.has_refused()) {
      refused_step_ = next_step_->number;
      // The step before is committed all the same.
      if (step_ && step_->number < next_step_->number) {
        ObserveStep();
        step_.reset();
      }
    } else {
      if (!step_ || step_->number != next_step_->number) {
        ObserveStep();
        AddTotals([](Totals* totals) {
          ++totals->steps;
          totals->began_at = MonotonicNow();
        });
      }
      refused_step_.reset();
      step_ = std::move(next_step_);
    }
    next_step_.reset();
    Reply(std::move(joined));
  }

  void JoinCall() {
    std::vector<v1::LayerResult> results;
    for (v1::StepResponse& answer : answers_) {
      results.push_back(std::move(*answer.mutable_result()));
    }
    absl::StatusOr<v1::LayerResult> joined =
        JoinResults(*spec_, placement_, *step_, request_.call(), results);
    if (!joined.ok()) return Reject(joined.status());
    AddTotals([](Totals* totals) {
      ++totals->calls;
      totals->answered_at = MonotonicNow();
    });
    v1::StepResponse response;
    *response.mutable_result() = *std::move(joined);
    Reply(std::move(response));
  }

  // ---------------------------------------------------------------------- records

  // The step has ended: reports its time, from StepBegin to the last result.
  void ObserveStep() {
    absl::MutexLock lock(&mutex_);
    const std::optional<absl::Time> began_at = std::exchange(totals_.began_at, std::nullopt);
    if (!began_at || totals_.answered_at < *began_at) return;
    context_.metrics->KvStepRelayed(totals_.answered_at - *began_at);
  }

  template <typename Change>
  void AddTotals(Change change) {
    absl::MutexLock lock(&mutex_);
    change(&totals_);
  }

  void WriteAudit() {
    if (context_.audit == nullptr) return;
    absl::MutexLock lock(&mutex_);
    // Without the id, which is a secret of anonymous clients.
    context_.audit->Write({{"client", caller_.principal},
                           {"peer", caller_.connection},
                           {"method", "Steps"},
                           {"code", CodeName(status_.error_code())},
                           {"error", status_.error_message()},
                           {"transport", "relay"},
                           {"steps", totals_.steps},
                           {"calls", totals_.calls},
                           {"bytes_up", totals_.received_bytes},
                           {"bytes_down", totals_.sent_bytes},
                           {"seconds", absl::ToDoubleSeconds(MonotonicNow() - started_at_)}});
  }

  const KvContext& context_;
  grpc::CallbackServerContext* const call_;
  const absl::Time started_at_;
  std::shared_ptr<KvRelay> self_;
  Caller caller_;

  // Used by one thread at a time: the one that handles the message in progress.
  v1::StepRequest request_;
  v1::StepResponse response_;
  std::string cache_id_;
  uint64_t epoch_ = 0;
  bool opened_ = false;
  std::shared_ptr<const KvCacheSpec> spec_;
  KvPlacement placement_;
  std::vector<std::string> workers_;  // by rank
  std::optional<KvStep> step_;        // begun
  std::optional<KvStep> next_step_;   // sent to the ranks
  std::optional<uint64_t> refused_step_;
  std::vector<v1::StepResponse> answers_;  // by rank

  absl::Mutex mutex_;
  Totals totals_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<KvShardStream>> shards_ ABSL_GUARDED_BY(mutex_);  // by rank
  int awaiting_ ABSL_GUARDED_BY(mutex_) = 0;                                    // answers of ranks
  bool greeted_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Time> finished_at_ ABSL_GUARDED_BY(mutex_);
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Time> broken_at_ ABSL_GUARDED_BY(mutex_);
  std::string broken_worker_ ABSL_GUARDED_BY(mutex_);
  std::string broken_why_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse>* StartKvRelay(
    const KvContext* context, grpc::CallbackServerContext* call) {
  // Deleted by its own reference.
  const auto relay = std::make_shared<KvRelay>(context, call);
  relay->Begin();
  return relay.get();
}

}  // namespace ringattn::server
