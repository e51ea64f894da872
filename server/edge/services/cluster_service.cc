#include "server/edge/services/cluster_service.h"

#include <optional>
#include <utility>
#include <variant>

#include "absl/time/time.h"
#include "common/request/option_fields.h"
#include "common/schedule/schedule.h"
#include "common/wire/durations.h"
#include "common/wire/proto_values.h"
#include "server/edge/header/error_details.h"

namespace ringattn::server {
namespace {

Failure TooManyWatchers(absl::Duration retry_after) {
  Failure failure;
  failure.code = absl::StatusCode::kResourceExhausted;
  failure.message = "too many clients watch the topology; use GetTopology";
  failure.reason = "TOO_MANY_WATCHERS";
  failure.retry_after = retry_after;
  return failure;
}

// Writes the newest topology whenever the previous write is done. Deletes itself.
class WatchStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                          public TopologyBoard::Watcher {
 public:
  // `too_many`: the status for a watcher beyond the limit.
  WatchStream(TopologyBoard* board, const grpc::Status& too_many) : board_(board) {
    if (!board_->Watch(this)) End(too_many);
  }

  void OnTopology(const grpc::ByteBuffer& response) override {
    absl::MutexLock lock(&mutex_);
    next_ = response;
    WriteNext();
  }

  void OnClosed() override {
    End(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is shutting down"));
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (ok) WriteNext();
  }

  void OnCancel() override { End(grpc::Status::CANCELLED); }

  void OnDone() override {
    board_->Unwatch(this);
    // Waits until the last holder has released the lock.
    { absl::MutexLock lock(&mutex_); }
    delete this;
  }

 private:
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_ || !next_.has_value()) return;
    response_ = *std::move(next_);
    next_.reset();
    writing_ = true;
    StartWrite(&response_);
  }

  void End(const grpc::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(finished_, true)) return;
    Finish(status);
  }

  TopologyBoard* const board_;
  absl::Mutex mutex_;
  std::optional<grpc::ByteBuffer> next_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer response_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

// Returns OK for a known caller.
grpc::Status CheckCaller(Callers* callers, const grpc::CallbackServerContext& call) {
  const std::variant<Caller, grpc::Status> caller = callers->Identify(call);
  const auto* refused = std::get_if<grpc::Status>(&caller);
  return refused == nullptr ? grpc::Status::OK : *refused;
}

class Refusal final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  explicit Refusal(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

}  // namespace

v1::GetServerInfoResponse MakeServerInfo(const std::string& version, const Limits& limits) {
  v1::GetServerInfoResponse info;
  info.set_version(version);
  for (v1::DataType dtype :
       {v1::DATA_TYPE_FLOAT32, v1::DATA_TYPE_BFLOAT16, v1::DATA_TYPE_FLOAT16}) {
    info.add_dtypes(dtype);
  }
  for (v1::Layout layout : {v1::LAYOUT_CONTIGUOUS, v1::LAYOUT_ZIGZAG, v1::LAYOUT_STRIPED,
                            v1::LAYOUT_ZIGZAG_PER_DOCUMENT}) {
    info.add_layouts(layout);
  }
  for (ScheduleKind kind : kAllScheduleKinds) info.add_schedules(ringattn::ToProto(kind));
  for (const std::string& option : ServedOptions()) info.add_options(option);
  for (const std::string& option : DeviceOptions()) info.add_device_options(option);
  v1::Limits* proto = info.mutable_limits();
  proto->set_max_tokens(limits.max_tokens);
  proto->set_max_heads(limits.max_heads);
  proto->set_max_head_dim(limits.max_head_dim);
  proto->set_max_batch(limits.max_batch);
  proto->set_max_request_bytes(limits.max_request_bytes);
  proto->set_max_documents(limits.max_documents);
  proto->set_max_dilation_levels(limits.max_dilation_levels);
  proto->set_max_dilated_segments(limits.max_dilated_segments);
  proto->set_max_dilated_parts(static_cast<uint32_t>(limits.max_dilated_parts));
  proto->set_max_world_size(limits.max_world_size);
  proto->set_max_chunk_bytes_up(limits.max_chunk_bytes_up);
  proto->set_max_chunk_bytes_down_default(limits.max_chunk_bytes_down_default);
  proto->set_max_inline_bytes(limits.max_inline_bytes);
  proto->set_max_queued_requests(limits.max_queued_requests);
  proto->set_max_queued_bytes(limits.max_queued_bytes);
  SetDuration(limits.upload_idle_timeout, proto->mutable_upload_idle_timeout());
  SetDuration(limits.download_idle_timeout, proto->mutable_download_idle_timeout());
  SetDuration(limits.header_timeout, proto->mutable_header_timeout());
  proto->set_max_writers(static_cast<uint32_t>(limits.max_writers));
  SetDuration(limits.writer_join_timeout, proto->mutable_writer_join_timeout());
  SetDuration(limits.default_prepare_ttl, proto->mutable_default_prepare_ttl());
  SetDuration(limits.max_prepare_ttl, proto->mutable_max_prepare_ttl());
  proto->set_max_calls_per_stream(limits.max_calls_per_stream);
  proto->set_min_upload_bytes_per_second(limits.min_upload_bytes_per_second);
  SetDuration(limits.upload_grace, proto->mutable_upload_grace());
  SetDuration(limits.upload_grace_contended, proto->mutable_upload_grace_contended());
  proto->set_max_streams_per_client(limits.max_streams_per_client);
  proto->set_max_streams_per_connection(limits.max_streams_per_connection);
  proto->set_max_residual_bytes(limits.max_residual_bytes);
  SetDuration(limits.default_residual_ttl, proto->mutable_default_residual_ttl());
  SetDuration(limits.max_residual_ttl, proto->mutable_max_residual_ttl());
  SetDuration(limits.residual_hold_ttl, proto->mutable_residual_hold_ttl());
  SetDuration(limits.residual_hold_grace, proto->mutable_residual_hold_grace());
  proto->set_max_kv_cache_bytes(limits.max_kv_cache_bytes);
  proto->set_max_kv_caches(static_cast<uint32_t>(limits.max_kv_caches));
  SetDuration(limits.default_kv_ttl, proto->mutable_default_kv_ttl());
  SetDuration(limits.max_kv_ttl, proto->mutable_max_kv_ttl());
  proto->set_max_step_rows(static_cast<uint32_t>(limits.max_step_rows));
  proto->set_max_step_tokens(static_cast<uint32_t>(limits.max_step_tokens));
  proto->set_max_sequences(static_cast<uint32_t>(limits.max_sequences));
  proto->set_max_kv_layers(static_cast<uint32_t>(limits.max_kv_layers));
  proto->set_max_kv_head_dim(static_cast<uint32_t>(limits.max_kv_head_dim));
  proto->set_max_step_bytes(static_cast<uint32_t>(limits.max_step_bytes));
  proto->set_max_streams_without_header(limits.max_streams_without_header);
  SetDuration(limits.max_deadline, proto->mutable_max_deadline());
  proto->set_single_device_threshold_tokens(limits.single_device_threshold_tokens);
  proto->set_default_host_link_bytes_per_second(limits.default_host_link_bytes_per_second);
  proto->set_finished_operations_kept(limits.finished_operations_kept);
  return info;
}

ClusterServiceImpl::ClusterServiceImpl(const std::string& version, const Limits& limits,
                                       absl::Duration retry_after, CoreLoop* core,
                                       TopologyBoard* board, Callers* callers)
    : info_(MakeServerInfo(version, limits)),
      too_many_watchers_(ToGrpcStatus(TooManyWatchers(retry_after), limits)),
      core_(core),
      board_(board),
      callers_(callers) {}

grpc::ServerUnaryReactor* ClusterServiceImpl::GetServerInfo(grpc::CallbackServerContext* call,
                                                            const v1::GetServerInfoRequest*,
                                                            v1::GetServerInfoResponse* response) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  const grpc::Status status = CheckCaller(callers_, *call);
  if (status.ok()) *response = info_;
  reactor->Finish(status);
  return reactor;
}

grpc::ServerUnaryReactor* ClusterServiceImpl::GetTopology(grpc::CallbackServerContext* call,
                                                          const v1::GetTopologyRequest*,
                                                          v1::GetTopologyResponse* response) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  if (const grpc::Status status = CheckCaller(callers_, *call); !status.ok()) {
    reactor->Finish(status);
    return reactor;
  }
  // The query follows all earlier events, so a client that received Accepted sees its reservation.
  const bool asked = core_->Ask([reactor, response](const Coordinator& core) {
    *response->mutable_topology() = core.topology();
    reactor->Finish(grpc::Status::OK);
  });
  if (!asked) {
    reactor->Finish(
        grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is busy or shutting down"));
  }
  return reactor;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* ClusterServiceImpl::WatchTopology(
    grpc::CallbackServerContext* call, const grpc::ByteBuffer*) {
  if (const grpc::Status status = CheckCaller(callers_, *call); !status.ok()) {
    return new Refusal(status);
  }
  return new WatchStream(board_, too_many_watchers_);
}

}  // namespace ringattn::server
