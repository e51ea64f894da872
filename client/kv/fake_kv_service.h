// A small KvCacheService and KvShardService for tests of the client, on free loopback ports. Every
// rank has the real step log (common/kv/step_log.h). A layer call returns its q as out.
#ifndef RINGATTN_CLIENT_KV_FAKE_KV_SERVICE_H_
#define RINGATTN_CLIENT_KV_FAKE_KV_SERVICE_H_

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/base/limits.h"
#include "common/kv/cache_spec.h"
#include "common/kv/kv_error.h"
#include "common/kv/placement.h"
#include "common/kv/step.h"
#include "common/kv/step_log.h"
#include "common/kv/step_metadata.h"
#include "common/security/credentials.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "ringattn/v1/kv_cache.grpc.pb.h"

namespace ringattn::client {

inline google::rpc::Status FakeRpcStatus(grpc::StatusCode code, const std::string& message,
                                         const std::string& reason) {
  google::rpc::Status status;
  status.set_code(code);
  status.set_message(message);
  google::rpc::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("ringattn");
  status.add_details()->PackFrom(info);
  return status;
}

inline grpc::Status FakeStatus(grpc::StatusCode code, const std::string& reason) {
  return grpc::Status(code, reason, FakeRpcStatus(code, reason, reason).SerializeAsString());
}

// One cache with id "cache". Thread safe.
class FakeKvService {
 public:
  using Stream = grpc::ServerReaderWriter<v1::StepResponse, v1::StepRequest>;

  // What goes wrong. Set through With.
  struct Faults {
    std::set<int> breaks;        // ranks whose next layer call ends the stream with UNAVAILABLE
    std::set<int> stalls;        // ranks whose next layer call is not answered
    std::set<int> other_tables;  // ranks that report another crc
    std::set<int> leaving;       // ranks whose worker was ordered to end
    bool unreachable = false;    // the tickets' endpoints do not exist
    google::rpc::Status ended;   // of GetCache, if its code is set
  };
  // What the client sent.
  struct Seen {
    std::vector<std::string> messages;  // "0 begin 1": rank, kind, step
    std::vector<v1::OpenCacheRequest> opens;
    std::set<std::string> held;
    int streams = 0;
    int deletes = 0;
    uint64_t last_epoch = 0;  // of a StepHello
  };

  explicit FakeKvService(const v1::KvCacheSpec& spec, int world_size)
      : spec_(*ParseKvCacheSpec(spec, Limits())), placement_(PlaceKvCache(spec_, world_size)) {
    for (int rank = 0; rank < world_size; ++rank) {
      logs_.push_back(std::make_unique<KvStepLog>(spec_, placement_));
      workers_.push_back(std::make_unique<Worker>(this, rank));
    }
    service_ = std::make_unique<Service>(this);
    address_ = Serve(service_.get());
    for (const auto& worker : workers_) endpoints_.push_back(Serve(worker.get()));
  }

  ~FakeKvService() {
    stopping_ = true;
    for (const auto& server : servers_) server->Shutdown(absl::ToChronoTime(absl::Now()));
  }

  const std::string& address() const { return address_; }
  template <typename Change>
  auto With(const Change& change) {
    absl::MutexLock lock(&mutex_);
    return change(faults, seen);
  }
  // Another writer opens the cache.
  void Fence() {
    absl::MutexLock lock(&mutex_);
    NextEpoch(0);
  }
  // The coordinator forgets the relay's token, as after a restart.
  void ForgetToken() {
    absl::MutexLock lock(&mutex_);
    relay_token_ = "forgotten";
  }

  Faults faults;
  Seen seen;

 private:
  class Worker final : public v1::KvShardService::Service {
   public:
    Worker(FakeKvService* fake, int rank) : fake_(fake), rank_(rank) {}
    grpc::Status Steps(grpc::ServerContext* context, Stream* stream) override {
      return fake_->RunSteps(rank_, /*is_relay=*/false, context, stream);
    }

   private:
    FakeKvService* const fake_;
    const int rank_;
  };

  class Service final : public v1::KvCacheService::Service {
   public:
    explicit Service(FakeKvService* fake) : fake_(fake) {}
    grpc::Status CreateCache(grpc::ServerContext*, const v1::CreateCacheRequest*,
                             v1::CreateCacheResponse* response) override {
      response->set_cache_id("cache");
      return grpc::Status::OK;
    }
    grpc::Status OpenCache(grpc::ServerContext*, const v1::OpenCacheRequest* request,
                           v1::OpenCacheResponse* response) override {
      return fake_->OpenCache(*request, response);
    }
    grpc::Status GetCache(grpc::ServerContext*, const v1::GetCacheRequest*,
                          v1::KvCacheInfo* response) override {
      return fake_->GetCache(response);
    }
    grpc::Status DeleteCache(grpc::ServerContext*, const v1::DeleteCacheRequest*,
                             v1::DeleteCacheResponse*) override {
      absl::MutexLock lock(&fake_->mutex_);
      ++fake_->seen.deletes;
      return grpc::Status::OK;
    }
    grpc::Status HoldCaches(
        grpc::ServerContext*,
        grpc::ServerReaderWriter<v1::HoldCachesResponse, v1::HoldCachesRequest>* stream) override {
      v1::HoldCachesRequest request;
      while (stream->Read(&request)) {
        v1::HoldCachesResponse response;
        {
          absl::MutexLock lock(&fake_->mutex_);
          for (const std::string& id : request.cache_ids()) {
            fake_->seen.held.insert(id);
            response.add_caches()->set_cache_id(id);
          }
          for (const std::string& id : request.released_ids()) fake_->seen.held.erase(id);
        }
        stream->Write(response);
      }
      return grpc::Status::OK;
    }
    grpc::Status Steps(grpc::ServerContext* context, Stream* stream) override {
      return fake_->RunSteps(0, /*is_relay=*/true, context, stream);
    }

   private:
    FakeKvService* const fake_;
  };

  std::string Serve(grpc::Service* service) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
    builder.RegisterService(service);
    servers_.push_back(builder.BuildAndStart());
    return absl::StrCat("127.0.0.1:", port);
  }

  // Fences and settles. Returns the last committed step.
  uint64_t NextEpoch(uint64_t answered_step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    ++epoch_;
    uint64_t last = answered_step;
    for (const auto& log : logs_) {
      log->Open(epoch_).IgnoreError();
      last = std::max(last, log->committed());
    }
    for (const auto& log : logs_) log->Settle(epoch_, last).IgnoreError();
    relay_token_ = absl::StrCat("token of epoch ", epoch_);
    return last;
  }

  grpc::Status OpenCache(const v1::OpenCacheRequest& request, v1::OpenCacheResponse* response) {
    absl::MutexLock lock(&mutex_);
    seen.opens.push_back(request);
    response->set_next_step(NextEpoch(request.answered_step()) + 1);
    response->set_epoch(epoch_);
    response->mutable_placement()->set_head_parts(placement_.head_parts);
    response->mutable_placement()->set_position_parts(placement_.position_parts);
    response->set_transport(request.accept(0));
    response->set_token(relay_token_);
    for (size_t rank = 0; rank < logs_.size(); ++rank) {
      if (request.accept(0) != v1::TRANSPORT_DIRECT) break;
      v1::KvShardTicket* ticket = response->add_shards();
      ticket->set_rank(static_cast<uint32_t>(rank));
      ticket->set_worker(absl::StrCat("worker-", rank));
      ticket->add_endpoints(faults.unreachable ? "127.0.0.1:1" : endpoints_[rank]);
      ticket->set_token("ticket");
    }
    return grpc::Status::OK;
  }

  grpc::Status GetCache(v1::KvCacheInfo* info) {
    absl::MutexLock lock(&mutex_);
    info->set_cache_id("cache");
    *info->mutable_spec() = ToProto(spec_);
    info->set_epoch(epoch_);
    if (faults.ended.code() != 0) *info->mutable_ended() = faults.ended;
    return grpc::Status::OK;
  }

  grpc::Status RunSteps(int rank, bool is_relay, grpc::ServerContext* context, Stream* stream) {
    v1::StepRequest request;
    uint64_t epoch = 0;
    const std::string hello = HelloOf(*context);
    while (stream->Read(&request)) {
      v1::StepResponse response;
      bool stalls = false;
      {
        absl::MutexLock lock(&mutex_);
        if (request.has_hello()) {
          ++seen.streams;
          epoch = seen.last_epoch = request.hello().epoch();
          if (is_relay && request.hello().token() != relay_token_ && epoch == epoch_) {
            return FakeStatus(grpc::StatusCode::UNAUTHENTICATED, "BAD_TOKEN");
          }
          if (hello != (is_relay ? "" : request.hello().SerializeAsString())) {
            return FakeStatus(grpc::StatusCode::INVALID_ARGUMENT, "BAD_METADATA");
          }
        }
        if (epoch != epoch_) return FakeStatus(grpc::StatusCode::ABORTED, "KV_FENCED");
        if (request.has_call()) {
          if (faults.breaks.erase(rank) > 0) {
            return grpc::Status(grpc::StatusCode::UNAVAILABLE, "broken");
          }
          stalls = faults.stalls.erase(rank) > 0;
        }
        if (!stalls) {
          const absl::Status status = Execute(rank, request, &response);
          if (!status.ok()) {
            return FakeStatus(static_cast<grpc::StatusCode>(status.code()), KvErrorReason(status));
          }
        }
      }
      while (stalls && !context->IsCancelled() && !stopping_) {
        absl::SleepFor(absl::Milliseconds(5));
      }
      if (stalls) return grpc::Status::CANCELLED;
      if (response.message_case() != v1::StepResponse::MESSAGE_NOT_SET) stream->Write(response);
    }
    return grpc::Status::OK;
  }

  // The StepHello in the call's metadata, serialized; empty if there is none.
  static std::string HelloOf(const grpc::ServerContext& context) {
    const auto found = context.client_metadata().find(kStepHelloMetadataKey);
    if (found == context.client_metadata().end()) return "";
    return std::string(found->second.data(), found->second.size());
  }

  absl::Status Execute(int rank, const v1::StepRequest& request, v1::StepResponse* response)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    KvStepLog& log = *logs_[rank];
    const auto note = [&](const char* kind, uint64_t step) {
      seen.messages.push_back(absl::StrCat(rank, " ", kind, " ", step));
    };
    if (request.has_hello()) {
      response->mutable_opened()->set_next_step(log.committed() + 1);
      for (const auto& [id, length] : log.blocks().sequences()) {
        v1::KvSequence* sequence = response->mutable_opened()->add_sequences();
        sequence->set_sequence(id);
        sequence->set_length(static_cast<uint64_t>(length));
      }
      return absl::OkStatus();
    }
    if (request.has_begin()) {
      note("begin", request.begin().step());
      absl::StatusOr<KvStep> step = ParseStep(request.begin(), Limits());
      if (!step.ok()) return step.status();
      auto begun = log.Begin(epoch_, *step);
      if (!begun.ok()) return begun.status();
      refused_[rank] = begun->refusals.empty() ? 0 : step->number;
      if (!begun->refusals.empty()) {
        *response->mutable_refused() = ToProto(step->number, begun->refusals);
        return absl::OkStatus();
      }
      response->mutable_accepted()->set_step(step->number);
      response->mutable_accepted()->set_tables_crc32c(
          log.blocks().tables_crc32c() + (faults.other_tables.count(rank) > 0 ? 1 : 0));
      response->mutable_accepted()->set_blocks_free(
          static_cast<uint64_t>(log.blocks().blocks_free()));
      response->mutable_accepted()->set_leaving(faults.leaving.count(rank) > 0);
      return absl::OkStatus();
    }
    if (request.has_commit()) {
      note("commit", request.commit().step());
      response->mutable_committed()->set_step(request.commit().step());
      return log.Commit(epoch_, request.commit().step());
    }
    const v1::LayerCall& call = request.call();
    note("call", call.step());
    if (call.step() == refused_[rank]) return absl::OkStatus();  // not answered
    const bool appends = !call.k().empty();
    if (auto status = log.StartCall(epoch_, call.step(), call.layer(), appends); !status.ok()) {
      return status;
    }
    log.FinishCall(call.layer(), appends);
    v1::LayerResult* result = response->mutable_result();
    result->set_step(call.step());
    result->set_layer(call.layer());
    result->set_out(call.q());
    result->mutable_device_time()->set_nanos(1000 * (rank + 1));
    return absl::OkStatus();
  }

  const KvCacheSpec spec_;
  const KvPlacement placement_;
  std::atomic<bool> stopping_{false};
  mutable absl::Mutex mutex_;
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string relay_token_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<KvStepLog>> logs_ ABSL_GUARDED_BY(mutex_);  // by rank
  std::map<int, uint64_t> refused_ ABSL_GUARDED_BY(mutex_);  // by rank; 0: not the last StepBegin
  std::vector<std::unique_ptr<Worker>> workers_;
  std::unique_ptr<Service> service_;
  std::vector<std::string> endpoints_;  // by rank
  std::string address_;
  std::vector<std::unique_ptr<grpc::Server>> servers_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_KV_FAKE_KV_SERVICE_H_
