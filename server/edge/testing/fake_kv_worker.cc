#include "server/edge/testing/fake_kv_worker.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/version.h"
#include "common/kv/kv_error.h"
#include "common/kv/shard_cut.h"
#include "common/security/credentials.h"
#include "common/security/secret.h"
#include "common/wire/packed_messages.h"
#include "server/edge/header/error_details.h"
#include "server/edge/kv/kv_requests.h"
#include "server/edge/testing/test_support.h"

namespace ringattn::server {
namespace {

grpc::Status StepFailure(const absl::Status& status) {
  return ToGrpcStatus(KvRequestFailure(status), Limits());
}

}  // namespace

FakeKvWorker::FakeKvWorker(const std::string& name, const std::string& control_address,
                           int64_t memory_bytes)
    : name_(name) {
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  stub_ = v1::WorkerControlService::NewStub(
      grpc::CreateChannel(control_address, TransportSecurity().ChannelCredentials()));
  context_.AddMetadata(kSecretMetadataKey, kTestSecret);
  control_ = stub_->Join(&context_);
  v1::JoinRequest message;
  v1::Register* registration = message.mutable_register_();
  registration->set_name(name);
  registration->set_incarnation(name);
  registration->set_version(kVersion);
  registration->set_device("fake");
  registration->set_memory_bytes(static_cast<uint64_t>(memory_bytes));
  registration->set_max_kv_cache_bytes(static_cast<uint64_t>(memory_bytes));
  registration->set_data_address(absl::StrCat("127.0.0.1:", port));
  control_->Write(message);
  control_thread_ = std::thread([this] { Control(); });
  heartbeat_thread_ = std::thread([this] { Beat(); });
}

FakeKvWorker::~FakeKvWorker() {
  Die();
  control_thread_.join();
  heartbeat_thread_.join();
}

void FakeKvWorker::Die() {
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(stopping_, true)) return;
  }
  context_.TryCancel();
  server_->Shutdown(std::chrono::system_clock::now());
}

int64_t FakeKvWorker::caches() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(caches_.size());
}

void FakeKvWorker::Beat() {
  v1::JoinRequest message;
  for (uint64_t sequence = 1;; ++sequence) {
    {
      absl::MutexLock lock(&mutex_);
      if (mutex_.AwaitWithTimeout(absl::Condition(&stopping_), absl::Milliseconds(500))) return;
    }
    message.mutable_heartbeat()->set_sequence(sequence);
    absl::MutexLock lock(&write_mutex_);
    control_->Write(message);
  }
}

void FakeKvWorker::Control() {
  v1::JoinResponse message;
  while (control_->Read(&message)) {
    wire::TakeApart(message, [&](const v1::JoinResponse& each, bool) { Answer(each); });
  }
  control_->Finish();
}

void FakeKvWorker::Answer(const v1::JoinResponse& message) {
  v1::JoinRequest reply;
  switch (message.message_case()) {
    case v1::JoinResponse::kPrepare:
      reply.mutable_prepared()->set_generation(message.prepare().generation());
      break;
    case v1::JoinResponse::kCommit:
      reply.mutable_committed()->set_generation(message.commit().generation());
      break;
    case v1::JoinResponse::kTeardown:
      reply.mutable_torn_down()->set_generation(message.teardown().generation());
      break;
    case v1::JoinResponse::kKvReserve: {
      absl::MutexLock lock(&mutex_);
      Reserve(message.kv_reserve(), reply.mutable_kv_reserved());
      break;
    }
    case v1::JoinResponse::kKvOpen: {
      absl::MutexLock lock(&mutex_);
      v1::KvOpened* opened = reply.mutable_kv_opened();
      opened->set_cache_id(message.kv_open().cache_id());
      opened->set_epoch(message.kv_open().epoch());
      const auto cache = caches_.find(opened->cache_id());
      opened->set_missing(cache == caches_.end() ||
                          !cache->second->log->Open(opened->epoch()).ok());
      if (opened->missing()) break;
      cache->second->token = message.kv_open().token();
      opened->set_committed_step(cache->second->log->committed());
      opened->set_complete_step(cache->second->log->complete());
      break;
    }
    case v1::JoinResponse::kKvSettle: {
      absl::MutexLock lock(&mutex_);
      v1::KvSettled* settled = reply.mutable_kv_settled();
      settled->set_cache_id(message.kv_settle().cache_id());
      settled->set_epoch(message.kv_settle().epoch());
      const auto cache = caches_.find(settled->cache_id());
      settled->set_ok(
          cache != caches_.end() &&
          cache->second->log->Settle(settled->epoch(), message.kv_settle().step()).ok());
      break;
    }
    case v1::JoinResponse::kKvFree: {
      absl::MutexLock lock(&mutex_);
      for (const std::string& id : message.kv_free().cache_ids()) {
        const auto cache = caches_.find(id);
        if (cache == caches_.end()) continue;
        cache->second->freed = message.kv_free().reason();
        caches_.erase(cache);
      }
      return;
    }
    default:
      return;
  }
  absl::MutexLock lock(&write_mutex_);
  control_->Write(reply);
}

void FakeKvWorker::Reserve(const v1::KvReserve& reserve, v1::KvReserved* reserved) {
  reserved->set_cache_id(reserve.cache_id());
  absl::StatusOr<KvCacheSpec> spec = ParseKvCacheSpec(reserve.spec(), Limits());
  reserved->set_ok(spec.ok());
  if (!spec.ok()) {
    reserved->set_malformed(true);
    reserved->set_reason(std::string(spec.status().message()));
    return;
  }
  auto cache = std::make_shared<Cache>();
  cache->reserve = reserve;
  cache->spec = *std::move(spec);
  cache->placement = PlaceKvCache(cache->spec, reserve.placement().members_size());
  cache->log = std::make_unique<KvStepLog>(cache->spec, cache->placement);
  reserved->set_bytes(static_cast<uint64_t>(
      KvBytesOfRank(cache->spec, cache->placement, static_cast<int>(reserve.rank()))));
  caches_[reserve.cache_id()] = std::move(cache);
}

grpc::Status FakeKvWorker::Steps(
    grpc::ServerContext* context,
    grpc::ServerReaderWriter<v1::StepResponse, v1::StepRequest>* stream) {
  if (grpc::Status status = CheckSecret(*context, kTestSecret); !status.ok()) return status;
  v1::StepRequest request;
  if (!stream->Read(&request) || !request.has_hello()) return grpc::Status::OK;
  std::shared_ptr<Cache> cache;
  const uint64_t epoch = request.hello().epoch();
  v1::StepResponse response;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = caches_.find(request.hello().cache_id());
    if (found == caches_.end() || found->second->token != request.hello().token() ||
        found->second->reserve.rank() != request.hello().rank()) {
      return grpc::Status(grpc::StatusCode::UNAUTHENTICATED, "wrong token");
    }
    cache = found->second;
    response.mutable_opened()->set_next_step(cache->log->committed() + 1);
    for (const auto& [sequence, length] : cache->log->blocks().sequences()) {
      v1::KvSequence* added = response.mutable_opened()->add_sequences();
      added->set_sequence(sequence);
      added->set_length(static_cast<uint64_t>(length));
    }
  }
  stream->Write(response);
  while (stream->Read(&request)) {
    response.Clear();
    {
      absl::MutexLock lock(&mutex_);
      if (!cache->freed.empty()) return grpc::Status(grpc::StatusCode::CANCELLED, "freed");
      if (grpc::Status status = AnswerStep(cache.get(), epoch, request, &response); !status.ok()) {
        return status;
      }
    }
    stream->Write(response);
  }
  return grpc::Status::OK;
}

grpc::Status FakeKvWorker::AnswerStep(Cache* cache, uint64_t epoch, const v1::StepRequest& request,
                                      v1::StepResponse* response) {
  KvStepLog& log = *cache->log;
  const int rank = static_cast<int>(cache->reserve.rank());
  if (request.has_begin()) {
    absl::StatusOr<KvStep> step = ParseStep(request.begin(), Limits());
    if (!step.ok()) return StepFailure(step.status());
    absl::StatusOr<KvStepLog::Begun> begun = log.Begin(epoch, *step);
    if (!begun.ok()) return StepFailure(begun.status());
    if (!begun->refusals.empty()) {
      *response->mutable_refused() = ToProto(step->number, begun->refusals);
      return grpc::Status::OK;
    }
    response->mutable_accepted()->set_step(step->number);
    response->mutable_accepted()->set_tables_crc32c(log.blocks().tables_crc32c() + checksum_error_);
    response->mutable_accepted()->set_blocks_free(
        static_cast<uint64_t>(log.blocks().blocks_free()));
    return grpc::Status::OK;
  }
  if (request.has_commit()) {
    if (absl::Status status = log.Commit(epoch, request.commit().step()); !status.ok()) {
      return StepFailure(status);
    }
    response->mutable_committed()->set_step(request.commit().step());
    return grpc::Status::OK;
  }
  const v1::LayerCall& call = request.call();
  const bool appends = !call.k().empty();
  absl::Status status = log.StartCall(epoch, call.step(), call.layer(), appends);
  if (!status.ok()) return StepFailure(status);
  const KvStep& step = *log.begun_step();
  const int group = FindLayer(cache->spec, call.layer())->group;
  const KvCallBytes bytes =
      CallBytesOfRank(cache->spec, cache->placement, step, group, call.output(), rank);
  status = CheckCallBytes(call, bytes);
  if (!status.ok()) return StepFailure(status);
  log.FinishCall(call.layer(), appends);
  response->mutable_result()->set_step(call.step());
  response->mutable_result()->set_layer(call.layer());
  // The result has q's shape where head_dim_v equals head_dim.
  response->mutable_result()->set_out(call.q().substr(0, static_cast<size_t>(bytes.out)));
  response->mutable_result()->set_lse(std::string(static_cast<size_t>(bytes.lse), '\0'));
  return grpc::Status::OK;
}

}  // namespace ringattn::server
