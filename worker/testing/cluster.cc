#include "worker/testing/cluster.h"
#include "worker/comm/wire/wire_ring_transport.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/security/credentials.h"
#include "common/security/secret.h"
#include "common/wire/crc32c.h"
#include "common/wire/open_metadata.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

using Message = v1::JoinRequest;

absl::Status FromGrpc(const grpc::Status& status) {
  return {static_cast<absl::StatusCode>(status.error_code()), status.error_message()};
}

std::vector<uint8_t> RandomFloats(int64_t bytes, uint32_t seed) {
  std::vector<uint8_t> data(bytes);
  for (int64_t i = 0; i < bytes / 4; ++i) {
    seed = seed * 1664525u + 1013904223u;
    const float value = static_cast<float>(seed >> 8) / (1 << 24) * 2.0f - 1.0f;
    std::memcpy(&data[i * 4], &value, 4);
  }
  return data;
}

void Fill(const AttentionSpec& spec, v1::Reserve* reserve) {
  v1::AttentionShape* shape = reserve->mutable_shape();
  shape->set_packing(static_cast<v1::Packing>(spec.shape.packing));
  shape->set_batch(spec.shape.batch);
  shape->set_seq_len_q(spec.shape.seq_len_q);
  shape->set_seq_len_kv(spec.shape.seq_len_kv);
  shape->set_num_heads(spec.shape.num_heads);
  shape->set_num_kv_heads(spec.shape.num_kv_heads);
  shape->set_head_dim(spec.shape.head_dim);
  shape->set_head_dim_v(spec.shape.head_dim_v);
  reserve->set_dtype(v1::DATA_TYPE_FLOAT32);
  reserve->mutable_options()->set_softmax_scale(spec.options.softmax_scale);
  reserve->mutable_options()->set_causal(spec.options.causal);
}

// Returns the shard of a tensor that `rank` owns.
std::string LocalOf(const TestRequest& request, TensorId id, int rank) {
  const ShardMap map = request.MapOf(id);
  const std::vector<uint8_t>& tensor = request.inputs.at(id);
  std::string local(map.local_bytes(rank), '\0');
  for (const ByteRun& run : map.FromLocal(rank, 0, map.local_bytes(rank))) {
    std::memcpy(&local[run.local_offset], &tensor[run.global_offset], run.bytes);
  }
  return local;
}

// Returns the parts of each token in sequence.
std::string Interleave(const std::vector<std::string>& parts, int64_t inner) {
  std::string whole;
  for (size_t at = 0; at < parts[0].size(); at += inner) {
    for (const std::string& part : parts) whole += part.substr(at, inner);
  }
  return whole;
}

// The same as LocalOf for a packed tensor.
std::string PackedLocalOf(const TestRequest& request, TensorId id, int rank) {
  std::vector<std::string> parts;
  for (TensorId part : PartsOf(id)) parts.push_back(LocalOf(request, part, rank));
  return Interleave(parts, LayoutOf(request.spec, PartsOf(id)[0]).inner_bytes);
}

}  // namespace

TestRequest TestRequest::Make(int64_t tokens, int world_size, Packing packing, uint32_t seed) {
  TestRequest request;
  AttentionShape& shape = request.spec.shape;
  shape.seq_len_q = shape.seq_len_kv = tokens;
  shape.num_heads = 4;
  shape.num_kv_heads = 2;
  shape.head_dim = 8;
  shape.head_dim_v = packing == Packing::kNone ? 12 : 8;
  if (packing == Packing::kQkv) shape.num_kv_heads = 4;
  shape.packing = packing;
  shape.cu_seqlens_q = shape.cu_seqlens_k = {0, tokens};
  request.spec.options.softmax_scale = 0.35;
  request.spec.options.causal = true;
  request.plan = MakeShardPlan(request.spec, Layout::kZigzag, world_size);
  for (TensorId id : {TensorId::kQ, TensorId::kK, TensorId::kV}) {
    request.inputs[id] =
        RandomFloats(LayoutOf(request.spec, id).bytes(), static_cast<uint32_t>(id) + 256 * seed);
  }
  auto result =
      RunInProcess(request.spec, request.plan,
                   MakeSchedule(request.spec, request.plan,
                                RecipeOn(request.plan, ScheduleKind::kRing, Direction::kForward)),
                   request.inputs, [] { return std::make_unique<ScalarDevice>(); });
  EXPECT_TRUE(result.ok()) << result.status();
  if (result.ok()) request.expected = result->outputs;
  return request;
}

ShardMap TestRequest::MapOf(TensorId id) const { return ShardMap(spec, plan, id); }

std::string TestRequest::ClientTensor(TensorId id) const {
  std::vector<std::string> parts;
  for (TensorId part : PartsOf(id)) {
    const std::vector<uint8_t>& data = inputs.at(part);
    parts.emplace_back(data.begin(), data.end());
  }
  if (parts.size() == 1) return parts[0];
  return Interleave(parts, LayoutOf(spec, PartsOf(id)[0]).inner_bytes);
}

TestExchange::TestExchange(const std::string& data_address, const std::string& secret) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  stub_ = v1::ShardService::NewStub(
      grpc::CreateCustomChannel(data_address, TransportSecurity().ChannelCredentials(), arguments));
  context_.AddMetadata(kSecretMetadataKey, secret);
  context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
}

absl::Status TestExchange::Open(const std::string& operation_id, uint64_t generation,
                                uint32_t max_chunk_bytes) {
  v1::OpenShard open;
  open.set_operation_id(operation_id);
  open.set_generation(generation);
  open.set_max_chunk_bytes(max_chunk_bytes);
  open.set_with_crc32c(true);
  wire::PutOpenShard(open, &context_);
  return Begin();
}

absl::Status TestExchange::OpenPart(const std::string& token, uint32_t part, uint32_t parts,
                                    uint32_t max_chunk_bytes) {
  v1::OpenShard open;
  open.set_max_chunk_bytes(max_chunk_bytes);
  open.set_token(token);
  open.set_part(part);
  open.set_parts(parts);
  wire::PutOpenShard(open, &context_);
  return Begin();
}

absl::Status TestExchange::OpenWith(const Metadata& metadata) {
  for (const auto& [key, value] : metadata) context_.AddMetadata(key, value);
  return Begin();
}

absl::Status TestExchange::Begin() {
  stream_ = stub_->Exchange(&context_);
  v1::ExchangeResponse response;
  if (stream_->Read(&response) && response.has_opened()) return absl::OkStatus();
  return Finish();
}

bool TestExchange::SendChunk(TensorId id, uint64_t offset, const std::string& data,
                             std::optional<uint32_t> crc32c) {
  v1::ExchangeRequest request;
  request.mutable_chunk()->set_tensor(static_cast<v1::TensorId>(id));
  request.mutable_chunk()->set_offset(offset);
  request.mutable_chunk()->set_data(data);
  if (crc32c.has_value()) request.mutable_chunk()->set_crc32c(*crc32c);
  return stream_->Write(request);
}

bool TestExchange::Upload(const TestRequest& request, int rank, int64_t piece_bytes) {
  std::map<TensorId, std::string> locals;
  for (const auto& [id, tensor] : request.inputs) {
    const TensorId whole = ClientTensorOf(request.spec, id);
    if (whole == id || request.parts_apart) {
      locals[id] = LocalOf(request, id, rank);
    } else {
      locals[whole] = PackedLocalOf(request, whole, rank);
    }
  }
  for (const auto& [id, local] : locals) {
    for (int64_t offset = 0; offset < static_cast<int64_t>(local.size()); offset += piece_bytes) {
      const std::string piece = local.substr(offset, piece_bytes);
      if (!SendChunk(id, offset, piece, wire::Crc32c(piece.data(), piece.size()))) return false;
    }
  }
  return true;
}

absl::Status TestExchange::Download(const TestRequest& request, int rank, TensorMap* outputs) {
  v1::ExchangeResponse response;
  uint64_t bytes = 0;
  bool done = false;
  while (stream_->Read(&response)) {
    if (response.has_done()) {
      EXPECT_EQ(response.done().bytes_sent(), bytes);
      done = true;
      continue;
    }
    const v1::TensorChunk& chunk = response.chunk();
    const TensorId id = static_cast<TensorId>(chunk.tensor());
    const ShardMap map = request.MapOf(id);
    std::vector<uint8_t>& tensor = (*outputs)[id];
    tensor.resize(map.global_bytes());
    for (const ByteRun& run : map.FromLocal(rank, chunk.offset(), chunk.data().size())) {
      std::memcpy(&tensor[run.global_offset], &chunk.data()[run.local_offset - chunk.offset()],
                  run.bytes);
    }
    bytes += chunk.data().size();
  }
  absl::Status status = Finish();
  EXPECT_TRUE(done || !status.ok()) << "no ShardDone";
  return status;
}

absl::Status TestExchange::Finish() {
  // The status follows everything that was sent before it.
  v1::ExchangeResponse unread;
  while (stream_->Read(&unread)) {
  }
  return FromGrpc(stream_->Finish());
}

Cluster::Cluster(int worker_count, WorkerOptions base)
    : coordinator_(std::make_unique<FakeCoordinator>(kTestSecret)) {
  for (int rank = 0; rank < worker_count; ++rank) {
    devices_.push_back(std::make_unique<ScalarDevice>());
    transports_.push_back(
        std::make_unique<WokenLinks>(std::make_unique<WireRingTransport>(WireTransportOptions{})));
    WorkerOptions options = base;
    options.name = Name(rank);
    options.coordinator = coordinator_->address();
    options.secret = kTestSecret;
    options.metrics_listen = "";  // closing the port takes two seconds
    if (!base.local_socket_path.empty()) {
      options.local_socket_path = LocalSocketPath(base.local_socket_path, options.name);
    }
    if (options.memory_limit_bytes == 0) options.memory_limit_bytes = 64 << 20;
    auto worker = Worker::Start(
        options, devices_.back().get(), transports_.back().get(), [](const std::string&) {},
        [this, rank](const std::string& what) {
          stuck_.push_back(what);
          devices_[rank]->SetStuck(false);
        });
    EXPECT_TRUE(worker.ok()) << worker.status();
    workers_.push_back(*std::move(worker));
  }
  WaitForAll();
}

std::string Cluster::Name(int rank) { return absl::StrCat("worker-", rank); }

void Cluster::WaitForAll() {
  for (int rank = 0; rank < size(); ++rank) {
    ASSERT_TRUE(coordinator_->WaitForWorker(Name(rank), absl::Seconds(10)).has_value());
  }
}

void Cluster::NewCoordinator() {
  const int port = coordinator_->port();
  coordinator_.reset();
  coordinator_ = std::make_unique<FakeCoordinator>(kTestSecret, port);
  WaitForAll();
}

std::vector<v1::Committed> Cluster::Form(uint64_t generation) {
  std::vector<v1::Committed> all;
  v1::JoinResponse commit;
  commit.mutable_commit()->set_generation(generation);
  for (int rank = 0; rank < size(); ++rank) {
    v1::JoinResponse prepare;
    prepare.mutable_prepare()->set_generation(generation);
    prepare.mutable_prepare()->set_rank(rank);
    prepare.mutable_prepare()->set_world_size(size());
    coordinator_->Send(Name(rank), prepare);
    const v1::Prepared prepared =
        coordinator_->Await(Name(rank), Message::kPrepared).value_or(Message()).prepared();
    EXPECT_EQ(prepared.generation(), generation);
    commit.mutable_commit()->add_blobs(prepared.blob());
  }
  for (int rank = 0; rank < size(); ++rank) coordinator_->Send(Name(rank), commit);
  for (int rank = 0; rank < size(); ++rank) {
    all.push_back(
        coordinator_->Await(Name(rank), Message::kCommitted).value_or(Message()).committed());
    EXPECT_EQ(all.back().generation(), generation);
  }
  return all;
}

void Cluster::TearDown(uint64_t generation) {
  v1::JoinResponse teardown;
  teardown.mutable_teardown()->set_generation(generation);
  for (int rank = 0; rank < size(); ++rank) coordinator_->Send(Name(rank), teardown);
  for (int rank = 0; rank < size(); ++rank) {
    const auto torn_down = coordinator_->Await(Name(rank), Message::kTornDown);
    ASSERT_TRUE(torn_down.has_value());
    EXPECT_EQ(torn_down->torn_down().generation(), generation);
  }
}

v1::Reserve Cluster::MakeReserve(const TestRequest& request, const std::string& id,
                                 uint64_t generation) const {
  v1::Reserve reserve;
  reserve.set_operation_id(id);
  reserve.set_generation(generation);
  for (int rank = 0; rank < size(); ++rank) reserve.add_members(rank);
  Fill(request.spec, &reserve);
  reserve.set_layout(v1::LAYOUT_ZIGZAG);
  reserve.set_schedule(size() == 1 ? v1::SCHEDULE_SINGLE : v1::SCHEDULE_RING);
  reserve.set_stripe(1);
  reserve.set_with_timeline(true);
  return reserve;
}

void Cluster::Reserve(const TestRequest& request, const std::string& id, uint64_t generation,
                      const std::string& token) {
  v1::JoinResponse message;
  v1::Reserve* reserve = message.mutable_reserve();
  *reserve = MakeReserve(request, id, generation);
  for (int rank = 0; rank < size(); ++rank) {
    if (!token.empty()) reserve->set_token(absl::StrCat(token, rank));
    coordinator_->Send(Name(rank), message);
  }
  for (int rank = 0; rank < size(); ++rank) {
    const auto reserved = coordinator_->Await(Name(rank), Message::kReserved);
    ASSERT_TRUE(reserved.has_value());
    EXPECT_TRUE(reserved->reserved().ok()) << reserved->reserved().reason();
    EXPECT_EQ(reserved->reserved().slowdown(), 1);
  }
}

void Cluster::SendRun(const std::string& id, uint64_t generation) {
  v1::JoinResponse message;
  message.mutable_run()->set_operation_id(id);
  message.mutable_run()->set_generation(generation);
  for (int rank = 0; rank < size(); ++rank) coordinator_->Send(Name(rank), message);
}

void Cluster::SendCancel(const std::string& id, uint64_t generation) {
  v1::JoinResponse message;
  message.mutable_cancel()->set_operation_id(id);
  message.mutable_cancel()->set_generation(generation);
  for (int rank = 0; rank < size(); ++rank) coordinator_->Send(Name(rank), message);
}

void Cluster::Release(const std::string& id, uint64_t generation) {
  v1::JoinResponse message;
  message.mutable_release()->set_operation_id(id);
  message.mutable_release()->set_generation(generation);
  for (int rank = 0; rank < size(); ++rank) coordinator_->Send(Name(rank), message);
  for (int rank = 0; rank < size(); ++rank) {
    const auto released = coordinator_->Await(Name(rank), Message::kReleased);
    ASSERT_TRUE(released.has_value());
    EXPECT_EQ(released->released().operation_id(), id);
  }
}

std::vector<v1::Finished> Cluster::AwaitFinished() {
  std::vector<v1::Finished> all;
  for (int rank = 0; rank < size(); ++rank) {
    const auto finished = coordinator_->Await(Name(rank), Message::kFinished, absl::Seconds(20));
    EXPECT_TRUE(finished.has_value());
    all.push_back(finished.value_or(Message()).finished());
  }
  return all;
}

std::vector<std::unique_ptr<TestExchange>> Cluster::UploadAll(const TestRequest& request,
                                                              const std::string& id,
                                                              uint64_t generation) {
  std::vector<std::unique_ptr<TestExchange>> exchanges;
  for (int rank = 0; rank < size(); ++rank) {
    exchanges.push_back(std::make_unique<TestExchange>(workers_[rank]->data_address()));
    const absl::Status status = exchanges.back()->Open(id, generation, 1000);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(exchanges.back()->Upload(request, rank, 777));
  }
  for (int rank = 0; rank < size(); ++rank) {
    EXPECT_TRUE(coordinator_->Await(Name(rank), Message::kUploaded).has_value());
  }
  return exchanges;
}

void Cluster::RunToTheEnd(const TestRequest& request, const std::string& id, uint64_t generation) {
  Reserve(request, id, generation);
  auto exchanges = UploadAll(request, id, generation);
  SendRun(id, generation);
  for (const v1::Finished& finished : AwaitFinished()) {
    EXPECT_TRUE(finished.ok()) << finished.reason();
  }
  TensorMap outputs;
  for (const auto& [id, tensor] : request.expected) outputs[id];  // includes the empty ones
  for (int rank = 0; rank < size(); ++rank) {
    const absl::Status status = exchanges[rank]->Download(request, rank, &outputs);
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_TRUE(outputs == request.expected);
  Release(id, generation);
}

void ExpectAllFree(Cluster& cluster) {
  const absl::Time patience = absl::Now() + absl::Seconds(20);
  for (int rank = 0; rank < cluster.size(); ++rank) {
    const uint64_t before = cluster.coordinator().LastHeartbeat(Cluster::Name(rank)).sequence();
    v1::Heartbeat heartbeat;
    do {
      absl::SleepFor(absl::Milliseconds(5));
      heartbeat = cluster.coordinator().LastHeartbeat(Cluster::Name(rank));
    } while (absl::Now() < patience &&
             (heartbeat.sequence() <= before || heartbeat.reserved_bytes() > 0));
    EXPECT_EQ(heartbeat.reserved_bytes(), 0u);
    EXPECT_TRUE(heartbeat.operation_id().empty());
  }
}

}  // namespace ringattn::worker
