#include "server/edge/testing/test_support.h"

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/version.h"
#include "common/layout/shard_plan.h"
#include "common/request/option_fields.h"
#include "common/request/validation.h"
#include "common/security/credentials.h"
#include "common/security/secret.h"
#include "common/wire/durations.h"
#include "common/wire/open_metadata.h"
#include "common/wire/packed_messages.h"
#include "common/wire/proto_values.h"
#include "common/wire/transport.h"

namespace ringattn::server {
namespace {

AttentionSpec SpecOf(const v1::Reserve& reserve) {
  const AttentionShape shape = FromProto(reserve.shape());
  Violations violations(/*max_bytes=*/1024);
  return {*FromProto(reserve.dtype()),
          shape,
          ReadOptions(reserve.options(), shape, violations),
          reserve.has_dlse(),
          reserve.fp32_results(),
          reserve.lse_per_document()};
}

ShardPlan PlanOf(const v1::Reserve& reserve) {
  return MakeShardPlan(SpecOf(reserve),
                       {.schedule = *FromProto(reserve.schedule()),
                        .layout = *FromProto(reserve.layout()),
                        .stripe = std::max<int64_t>(1, reserve.stripe())},
                       reserve.members_size());
}

ShardMap MapOf(const v1::Reserve& reserve, TensorId id) {
  const ShardPlan plan = PlanOf(reserve);
  return ShardMap(SpecOf(reserve), plan, id);
}

}  // namespace

std::string Pattern(int tensor, uint64_t offset, uint64_t bytes) {
  std::string data(bytes, '\0');
  for (uint64_t i = 0; i < bytes; ++i) data[i] = PatternByte(tensor, offset + i);
  return data;
}

bool WaitUntil(const std::function<bool()>& condition, absl::Duration timeout) {
  const absl::Time end = absl::Now() + timeout;
  while (!condition()) {
    if (absl::Now() > end) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return true;
}

// ------------------------------------------------------------------ FakeWorker

FakeWorker::FakeWorker(const std::string& name, const std::string& control_address) : name_(name) {
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(-1);
  wire::SetTransport(&builder);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  data_address_ = absl::StrCat("127.0.0.1:", port);
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  stub_ = v1::WorkerControlService::NewStub(grpc::CreateCustomChannel(
      control_address, TransportSecurity().ChannelCredentials(), arguments));
  context_.AddMetadata(kSecretMetadataKey, kTestSecret);
  control_ = stub_->Join(&context_);
  v1::JoinRequest request;
  v1::Register* registration = request.mutable_register_();
  registration->set_name(name_);
  registration->set_incarnation(name_);
  registration->set_device("fake");
  registration->set_memory_bytes(int64_t{1} << 50);
  registration->set_threads(1);
  registration->set_data_address(data_address_);
  registration->set_version(kVersion);
  Send(request);
  control_thread_ = std::thread([this] { Control(); });
  heartbeat_thread_ = std::thread([this] { Beat(); });
}

FakeWorker::~FakeWorker() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = upload_open_ = send_open_ = run_open_ = true;
    for (auto& [id, operation] : operations_) operation->released = true;
  }
  context_.TryCancel();
  control_thread_.join();
  heartbeat_thread_.join();
  server_->Shutdown(std::chrono::system_clock::now());
}

void FakeWorker::SetUploadGate(bool open) {
  absl::MutexLock lock(&mutex_);
  upload_open_ = open;
}

void FakeWorker::SetSendGate(bool open) {
  absl::MutexLock lock(&mutex_);
  send_open_ = open;
}

void FakeWorker::SetRunGate(bool open) {
  absl::MutexLock lock(&mutex_);
  run_open_ = open;
}

int FakeWorker::held_operations() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(operations_.size());
}

void FakeWorker::Send(const v1::JoinRequest& message) {
  absl::MutexLock lock(&write_mutex_);
  control_->Write(message);
}

void FakeWorker::Beat() {
  for (uint64_t sequence = 1;; ++sequence) {
    {
      absl::MutexLock lock(&mutex_);
      if (mutex_.AwaitWithTimeout(absl::Condition(&stopping_), absl::Milliseconds(200))) return;
    }
    v1::JoinRequest request;
    request.mutable_heartbeat()->set_sequence(sequence);
    Send(request);
  }
}

void FakeWorker::Control() {
  v1::JoinResponse message;
  while (control_->Read(&message)) {
    wire::TakeApart(message, [&](const v1::JoinResponse& each, bool) { Answer(each); });
  }
  control_->Finish();
}

void FakeWorker::Answer(const v1::JoinResponse& message) {
  v1::JoinRequest reply;
  switch (message.message_case()) {
    case v1::JoinResponse::kPrepare: {
      {
        absl::MutexLock lock(&mutex_);
        prepared_rank_ = message.prepare().rank();
      }
      reply.mutable_prepared()->set_generation(message.prepare().generation());
      reply.mutable_prepared()->set_blob(name_);
      return Send(reply);
    }
    case v1::JoinResponse::kCommit:
      reply.mutable_committed()->set_generation(message.commit().generation());
      return Send(reply);
    case v1::JoinResponse::kTeardown:
      reply.mutable_torn_down()->set_generation(message.teardown().generation());
      return Send(reply);
    case v1::JoinResponse::kReserve:
      return Reserve(message.reserve());
    case v1::JoinResponse::kRun: {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&run_open_));
      const auto found = operations_.find(message.run().operation_id());
      if (found == operations_.end()) return;
      found->second->run = true;
      v1::Finished* finished = reply.mutable_finished();
      finished->set_operation_id(message.run().operation_id());
      finished->set_generation(message.run().generation());
      finished->set_ok(true);
      const int bars = found->second->reserve.with_timeline() ? 10'000 : 0;
      for (int i = 0; i < bars; ++i) {
        finished->mutable_report()->add_timeline()->set_name(
            "a step of a long computation that is told");
      }
      break;
    }
    case v1::JoinResponse::kDropResiduals:
      dropped_residuals_ += message.drop_residuals().operation_ids_size();
      return;
    case v1::JoinResponse::kCancel: {
      v1::Finished* finished = reply.mutable_finished();
      finished->set_operation_id(message.cancel().operation_id());
      finished->set_generation(message.cancel().generation());
      finished->set_cancelled(true);
      break;
    }
    case v1::JoinResponse::kRelease: {
      absl::MutexLock lock(&mutex_);
      const auto found = operations_.find(message.release().operation_id());
      if (found != operations_.end()) {
        found->second->released = true;
        operations_.erase(found);
      }
      reply.mutable_released()->set_operation_id(message.release().operation_id());
      reply.mutable_released()->set_generation(message.release().generation());
      break;
    }
    default:
      return;
  }
  Send(reply);
}

void FakeWorker::Reserve(const v1::Reserve& reserve) {
  ++reserves_;
  auto operation = std::make_shared<Operation>();
  operation->reserve = reserve;
  const Direction direction = reserve.backward() ? Direction::kBackward : Direction::kForward;
  operation->inputs = ShardInputsOf(SpecOf(reserve), direction, reserve.recompute_forward());
  operation->outputs = ShardOutputsOf(SpecOf(reserve), direction);
  {
    absl::MutexLock lock(&mutex_);
    const auto rank = std::find(reserve.members().begin(), reserve.members().end(),
                                static_cast<uint32_t>(prepared_rank_));
    operation->rank = static_cast<int>(rank - reserve.members().begin());
    for (TensorId id : operation->inputs) {
      operation->missing_bytes += MapOf(reserve, id).local_bytes(operation->rank);
    }
    operations_[reserve.operation_id()] = operation;
  }
  v1::JoinRequest reply;
  reply.mutable_reserved()->set_operation_id(reserve.operation_id());
  reply.mutable_reserved()->set_generation(reserve.generation());
  reply.mutable_reserved()->set_ok(true);
  Send(reply);
  if (operation->missing_bytes > 0) return;
  v1::JoinRequest uploaded;
  uploaded.mutable_uploaded()->set_operation_id(reserve.operation_id());
  uploaded.mutable_uploaded()->set_generation(reserve.generation());
  Send(uploaded);
}

void FakeWorker::ForEachByte(
    const Operation& operation, int tensor, uint64_t offset, uint64_t bytes,
    const std::function<void(uint64_t index, uint64_t global)>& visit) const {
  const ShardMap map = MapOf(operation.reserve, static_cast<TensorId>(tensor));
  for (const ByteRun& run : map.FromLocal(operation.rank, offset, bytes)) {
    for (int64_t i = 0; i < run.bytes; ++i) {
      visit(run.local_offset + i - offset, run.global_offset + i);
    }
  }
}

grpc::Status FakeWorker::Exchange(
    grpc::ServerContext* context,
    grpc::ServerReaderWriter<v1::ExchangeResponse, v1::ExchangeRequest>* stream) {
  const std::optional<v1::OpenShard> asked = wire::ReadOpenShard(*context);
  if (!asked.has_value()) {
    return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "no OpenShard");
  }
  const v1::OpenShard& open = *asked;
  std::shared_ptr<Operation> operation;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = operations_.find(open.operation_id());
    if (found == operations_.end()) return grpc::Status(grpc::StatusCode::NOT_FOUND, "unknown");
    operation = found->second;
  }
  v1::ExchangeResponse response;
  response.mutable_opened();
  stream->Write(response);
  v1::ExchangeRequest request;
  while (operation->missing_bytes > 0) {
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&upload_open_));
    }
    if (!stream->Read(&request)) return grpc::Status::CANCELLED;
    const v1::TensorChunk& chunk = request.chunk();
    ForEachByte(*operation, chunk.tensor(), chunk.offset(), chunk.data().size(),
                [&](uint64_t index, uint64_t global) {
                  wrong_bytes_ += chunk.data()[index] != PatternByte(chunk.tensor(), global);
                });
    received_bytes_ += chunk.data().size();
    operation->missing_bytes -= chunk.data().size();
    if (operation->missing_bytes > 0) continue;
    v1::JoinRequest uploaded;
    uploaded.mutable_uploaded()->set_operation_id(open.operation_id());
    uploaded.mutable_uploaded()->set_generation(open.generation());
    Send(uploaded);
  }
  {
    absl::MutexLock lock(&mutex_);
    const auto may_send = [&] { return operation->run || operation->released; };
    mutex_.Await(absl::Condition(&may_send));
    if (operation->released) return grpc::Status(grpc::StatusCode::ABORTED, "released");
  }
  for (TensorId id : operation->outputs) {
    const int64_t bytes = MapOf(operation->reserve, id).local_bytes(operation->rank);
    for (int64_t at = 0; at < bytes; at += open.max_chunk_bytes()) {
      v1::TensorChunk* chunk = response.mutable_chunk();
      chunk->set_tensor(static_cast<v1::TensorId>(id));
      chunk->set_offset(at);
      std::string data(std::min<int64_t>(bytes - at, open.max_chunk_bytes()), '\0');
      ForEachByte(*operation, static_cast<int>(id), at, data.size(),
                  [&](uint64_t index, uint64_t global) {
                    data[index] = PatternByte(static_cast<int>(id), global);
                  });
      chunk->set_data(std::move(data));
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(&send_open_));
      }
      if (!stream->Write(response)) return grpc::Status::CANCELLED;
      sent_bytes_ += chunk->data().size();
    }
  }
  response.mutable_done();
  stream->Write(response);
  return grpc::Status::OK;
}

// ----------------------------------------------------------------- TestCluster

TestCluster::TestCluster(int worker_count, const std::function<void(ServerOptions*)>& change) {
  ServerOptions options;
  options.listen = options.control_listen = "127.0.0.1:0";
  options.metrics_listen.clear();
  options.secret = kTestSecret;
  options.core.version = kVersion;
  options.core.forming_delay = absl::Milliseconds(50);
  options.core.assembly_time_max = absl::ZeroDuration();
  options.core.replacement_time_max = absl::ZeroDuration();
  if (change) change(&options);
  absl::StatusOr<std::unique_ptr<Server>> started = Server::Start(std::move(options));
  if (!started.ok()) std::abort();
  server = *std::move(started);
  for (int i = 0; i < worker_count; ++i) {
    workers.push_back(
        std::make_unique<FakeWorker>(absl::StrCat("fake-", i), server->addresses().control));
  }
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  channel = grpc::CreateCustomChannel(server->addresses().listen,
                                      TransportSecurity().ChannelCredentials(), arguments);
  attention = v1::AttentionService::NewStub(channel);
  cluster = v1::ClusterService::NewStub(channel);
  const bool ready = WaitUntil([&] {
    const v1::Topology now = topology();
    int ranks = 0;
    for (const v1::WorkerInfo& worker : now.workers()) ranks += worker.has_rank();
    return ranks == worker_count;
  });
  if (!ready) std::abort();
}

TestCluster::~TestCluster() {
  server->Shutdown(absl::ZeroDuration());
  workers.clear();
}

v1::Topology TestCluster::topology() const {
  grpc::ClientContext context;
  v1::GetTopologyResponse response;
  cluster->GetTopology(&context, v1::GetTopologyRequest(), &response);
  return response.topology();
}

bool TestCluster::WaitIdle() const {
  return WaitUntil([&] {
    return std::all_of(workers.begin(), workers.end(),
                       [](const auto& worker) { return worker->held_operations() == 0; });
  });
}

}  // namespace ringattn::server
